"""docs/quickstart-trl.md, followed word for word on one real vLLM server."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from policyline.engines.child import free_port
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE
from tests.shell import Shell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart-trl.md").read_text()
ON_A_CPU = (
    "AsyncGRPOConfig(use_cpu=True, bf16=False, gradient_checkpointing=False, token_budget=0, "
    "chat_template_kwargs={}, max_steps=3, num_generations=4, per_device_train_batch_size=4, "
    "max_inflight_tasks=8, max_completion_length=16, report_to=[], save_strategy='no', "
)
"""What the page's configuration needs to train on a CPU, and to end soon."""
SMALL = "--max-model-len 256 --max-num-seqs 16 --enforce-eager --served-model-name tiny "


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_works_word_for_word(tmp_path: Path, tiny_base: Path) -> None:
    (script,) = blocks("python")
    (change,) = blocks("diff")
    start_vllm, start_sidecar, train, ask = blocks("bash")
    removed = [line for line in change.splitlines() if re.match(r"-(?!--)", line)]
    added = [line for line in change.splitlines() if re.match(r"\+(?!\+\+)", line)]
    assert (len(removed), len(added)) == (1, 2)  # one line changed, one new

    file = tmp_path / "train.py"
    file.write_text(script)
    patch = ["patch", "--fuzz=0", "-p0", str(file)]
    subprocess.run(patch, input=change, text=True, check=True)
    adapted = file.read_text().replace("AsyncGRPOConfig(", ON_A_CPU)
    file.write_text(f"import examples.cpu_stand_in\n{adapted}")

    vllm_port, status_port = str(free_port()), str(free_port())

    def here(text: str) -> str:
        return text.replace("8000", vllm_port).replace("9109", status_port)

    file.write_text(here(file.read_text()))
    shell = Shell(tmp_path, MODEL=str(tiny_base))
    try:
        shell.run(here(start_vllm).replace("--enable-lora", f"{SMALL}--enable-lora"))
        shell.run(here(start_sidecar))
        shell.until_joined(tmp_path / "run.db")
        shell.run(train)
        said = shell.run(ask)
    finally:
        shell.stop()
    assert "trl-policy-v1" in said
    assert "reward" in said
    with Ledger(str(tmp_path / "run.db")) as ledger:
        versions = ledger.versions(run="first-run")
        assert [v.version for v in versions][:2] == [1, 2]
        metadata = json.loads(versions[-1].manifest or "")["metadata"]
        assert metadata["step"] == 3
        # a real server on the trainer's own weights; bf16 against fp32
        assert metadata["ratio"] == pytest.approx(1.0, abs=0.05)
        assert ledger.view(DEFAULT_LINE).current == versions[-1].version
