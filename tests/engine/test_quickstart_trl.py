"""docs/quickstart-trl.md, followed word for word on one real vLLM server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from policyline.engines.child import free_port
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE

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
WITHIN_S = 300.0


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
    shell = Shell(tmp_path, tiny_base)
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


class Shell:
    """One bash after the other in one directory; what they leave behind is stopped at the end."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        binaries = str(Path(sys.executable).parent)
        self._environment = {
            **os.environ,
            "MODEL": str(model),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        self._groups: list[int] = []

    def run(self, text: str) -> str:
        """Run a block to its end; what it starts with `&` goes on."""
        out = self._directory / f"block-{len(self._groups)}.log"
        with out.open("w") as log:
            process = subprocess.Popen(
                ["bash", "-euc", text],
                cwd=self._directory,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._groups.append(process.pid)
        assert process.wait(WITHIN_S) == 0, out.read_text()[-3000:]
        return out.read_text()

    def until_joined(self, ledger: Path) -> None:
        """Wait for the sidecar, which waits for vLLM."""
        deadline = time.monotonic() + WITHIN_S
        with Ledger(str(ledger)) as opened:
            while not opened.replicas(DEFAULT_LINE):
                assert time.monotonic() < deadline, "the sidecar has not joined"
                time.sleep(0.2)

    def stop(self) -> None:
        """End every group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in self._groups:
                try:
                    os.killpg(group, number)
                except ProcessLookupError:
                    continue
            time.sleep(1 if number is signal.SIGTERM else 0)
