"""Adapters written without torch, and what the double makes of them."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from policyline.demo.synthetic import TINY, BaseShape, write_adapter
from policyline.engines.simulated.weights import AdapterLimits, read_weights
from tests.engines import not_a_number, zero_b

LIMITS = AdapterLimits(max_lora_rank=8)


def test_the_files_of_peft(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", 1, rank=4)

    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert len(tensors) == 2 * TINY.layers * len(TINY.modules())
    name = "base_model.model.model.layers.1.mlp.down_proj"
    assert tensors[f"{name}.lora_A.weight"].shape == (4, 256)
    assert tensors[f"{name}.lora_B.weight"].shape == (128, 4)


def test_seeds(tmp_path: Path) -> None:
    one, again, other = (
        hashlib.sha256((write_adapter(tmp_path / n, s) / "adapter_model.safetensors").read_bytes())
        for n, s in (("a", 1), ("b", 1), ("c", 2))
    )

    assert one.digest() == again.digest() != other.digest()


@pytest.mark.parametrize("size_bytes", [1_000_000, 5_000_000, 20_000_000])
def test_a_size_is_met(tmp_path: Path, size_bytes: int) -> None:
    directory = write_adapter(tmp_path / "a", 1, rank=8, size_bytes=size_bytes)

    size = (directory / "adapter_model.safetensors").stat().st_size
    assert abs(size - size_bytes) < 0.3 * 1_000_000
    assert read_weights(str(directory), LIMITS).key


def test_a_narrow_key_projection() -> None:
    assert BaseShape(hidden_size=64, heads=4, kv_heads=1).modules()["self_attn.k_proj"] == (64, 16)


def test_weights_are_known_by_their_bytes(tmp_path: Path) -> None:
    one, same, other = (
        read_weights(str(write_adapter(tmp_path / name, seed)), LIMITS)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )

    assert one == same
    assert one.key != other.key
    assert one.finite


def test_weights_that_change_nothing_and_weights_that_are_none(tmp_path: Path) -> None:
    assert read_weights(str(zero_b(tmp_path / "zero")), LIMITS).key == b""
    assert not read_weights(str(not_a_number(tmp_path / "nan")), LIMITS).finite


def test_every_process_gives_the_same_numbers(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a", 1))
    script = (
        "import sys\n"
        "from policyline.engines.simulated.language import EMPTY, extend, log_probabilities\n"
        "from policyline.engines.simulated.weights import AdapterLimits, read_weights\n"
        "key = read_weights(sys.argv[1], AdapterLimits(8)).key\n"
        "print(list(log_probabilities(extend(EMPTY, [1, 2, 3], key), key, 64)))\n"
    )
    command = [sys.executable, "-c", script, path]
    outputs = {
        subprocess.run(
            command, check=True, capture_output=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }

    assert len(outputs) == 1
