"""Runs the command blocks of a page as a reader would, in a directory of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from policyline.ledger import Ledger
from policyline.ledger.errors import LedgerUnavailable, SchemaMismatch
from policyline.ledger.names import DEFAULT_LINE

ROOT = Path(__file__).parents[1]
WITHIN_S = 300.0


class Shell:
    """One bash after the other in one directory; what they leave behind is stopped at the end.

    Args:
        directory: where they run; its `bin` comes first in PATH.
        variables: of their environment.
    """

    def __init__(self, directory: Path, **variables: str) -> None:
        self._directory = directory
        binaries = [str(directory / "bin"), str(Path(sys.executable).parent)]
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([*binaries, os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **variables,
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

    def tail(self) -> str:
        """The end of what each block has printed so far, what it left running included."""
        logs = sorted(self._directory.glob("block-*.log"))
        return "\n".join(log.read_text()[-2000:] for log in logs)

    def until_joined(self, ledger: Path) -> None:
        """Wait for the sidecar, which creates the ledger and waits for vLLM."""
        deadline = time.monotonic() + WITHIN_S
        while not _joined(ledger):
            assert time.monotonic() < deadline, f"the sidecar has not joined: {self.tail()}"
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


def _joined(ledger: Path) -> bool:
    try:
        with Ledger(str(ledger)) as opened:
            return bool(opened.replicas(DEFAULT_LINE))
    except (LedgerUnavailable, SchemaMismatch):  # it is about to be created
        return False
