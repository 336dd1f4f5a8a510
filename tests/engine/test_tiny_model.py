"""The demo's base model and adapters, made with torch and PEFT."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policyline.demo.synthetic import TINY, adapter_tensors
from policyline.engines.simulated.weights import AdapterLimits, read_weights

pytestmark = pytest.mark.engine


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_base_is_a_small_qwen2_that_trl_knows(tiny_base: Path) -> None:
    config = json.loads((tiny_base / "config.json").read_text())
    template = run(
        "-c", "from trl.chat_template_utils import qwen2_5_chat_template as t; print(t, end='')"
    )

    assert config["model_type"] == "qwen2"
    assert (config["hidden_size"], config["num_hidden_layers"]) == (TINY.hidden_size, TINY.layers)
    assert (tiny_base / "chat_template.jinja").read_text() == template


def test_adapters_of_peft_differ_and_look_like_ours(tiny_base: Path, tmp_path: Path) -> None:
    run("-m", "policyline.demo.tiny_model", "adapters", str(tiny_base), str(tmp_path), "3")

    paths = [tmp_path / f"adapter-{number}" for number in (1, 2, 3)]
    limits = AdapterLimits(max_lora_rank=8, hidden_size=TINY.hidden_size, layers=TINY.layers)
    assert len({read_weights(str(path), limits).key for path in paths}) == 3
    names = run(
        "-c",
        "import sys; from safetensors import safe_open\n"
        "print(*safe_open(sys.argv[1], 'np').keys())",
        str(paths[0] / "adapter_model.safetensors"),
    )
    assert set(names.split()) == set(adapter_tensors(1))
