"""A fleet of doubles with real sidecars, and a real TRL trainer as a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from policyline.engines.child import ChildServer
from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import Ledger
from policyline.ledger.canonical import parse_object
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.names import DEFAULT_LINE, policy_name

EXAMPLE = Path(__file__).parents[3] / "examples" / "async_grpo.py"
WITHIN_S = 280.0
"""For a trainer, whose imports alone take 20 s; several times that under load."""


class Stage:
    """What one test trains on.

    Args:
        root: an empty directory.
        model: the tiny base model.
        vocabulary: how many tokens it has.
    """

    def __init__(self, root: Path, model: Path, vocabulary: int) -> None:
        self.root = root
        self.model = model
        self.ledger_url = str(root / "run.db")
        self.storage = root / "storage"
        self.storage.mkdir()
        self._vocabulary = vocabulary
        self._stack = ExitStack()
        self.engines: dict[str, SimulatedChild] = {}
        self.sidecars: dict[str, ChildServer] = {}
        upgrade_url(self.ledger_url)
        self.ledger = self._stack.enter_context(Ledger(self.ledger_url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def engine(self, replica: str) -> SimulatedChild:
        """Start a double; wait for it."""
        options = ServiceOptions(
            engine=EngineOptions(vocab_size=self._vocabulary),
            served_model_name="tiny",
            model=str(self.model),
            step_delay_s=0.002,
        )
        engine = SimulatedChild(options, log_path=self.root / f"engine-{replica}.log")
        self._stack.enter_context(engine)
        engine.wait_healthy(60)
        self.engines[replica] = engine
        return engine

    def serve(self, *replicas: str) -> None:
        """Start a double and its sidecar for each; wait until they have joined."""
        for replica in replicas:
            engine = self.engine(replica)
            command = [sys.executable, "-m", "policyline", "sidecar", "--vllm", engine.url]
            command += ["--ledger", self.ledger_url, "--storage", str(self.storage)]
            command += ["--cache", str(self.root / "cache" / replica), "--replica", replica]
            command += ["--listen", "127.0.0.1:{port}", "--poll-interval", "1"]
            sidecar = ChildServer(command, log_path=self.root / f"sidecar-{replica}.log")
            self._stack.enter_context(sidecar)
            self.sidecars[replica] = sidecar
        until(lambda: {r.replica for r in self.ledger.replicas(DEFAULT_LINE)} >= set(replicas))

    def trainer(self, run: str, *arguments: str, launcher: tuple[str, ...] = ()) -> Trainer:
        """Start training of `run`."""
        url = next(iter(self.engines.values())).url
        command = [sys.executable, *launcher, str(EXAMPLE), "--profile", "tiny"]
        command += ["--model", str(self.model), "--vllm", url, "--run", run]
        command += ["--ledger", self.ledger_url, "--storage", str(self.storage)]
        command += ["--output", str(self.root / "out"), *arguments]
        trainer = Trainer(command, self.root / f"trainer-{run}-{time.monotonic_ns()}.log")
        self._stack.callback(trainer.kill)
        return trainer

    def published(self) -> list[int]:
        """Versions that were published, in the order in which they were."""
        rows = [r for r in self.ledger.versions(line=DEFAULT_LINE) if r.published_seq is not None]
        return [r.version for r in sorted(rows, key=lambda r: r.published_seq or 0)]

    def metadata(self, version: int) -> dict[str, Any]:
        """What was recorded with a version."""
        row = self.ledger.version(DEFAULT_LINE, version)
        found: dict[str, Any] = parse_object(row.manifest or "{}")["metadata"]
        return found

    def answers(self, replica: str, version: int) -> bool:
        """Whether a replica answers a rollout that names the version."""
        body = {"model": policy_name(DEFAULT_LINE, version), "prompt": [5, 6], "max_tokens": 1}
        try:
            self._post(replica, "/v1/completions", body)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        return True

    def load(self, replica: str, name: str, path: Path) -> None:
        """Load an adapter behind the sidecar's back."""
        body = {"lora_name": name, "lora_path": str(path)}
        self._post(replica, "/v1/load_lora_adapter", body)

    def _post(self, replica: str, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"{self.engines[replica].url}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        urllib.request.urlopen(request).close()

    def asked(self, replica: str) -> dict[str, int]:
        """How often each path of a double was asked."""
        with urllib.request.urlopen(f"{self.engines[replica].url}/_requests") as answer:
            found: dict[str, int] = json.load(answer)
        return found


class Trainer:
    """A trainer in a process group of its own."""

    def __init__(self, command: list[str], log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def log(self) -> str:
        """Everything it has said."""
        return self._log_path.read_text(errors="replace")

    def wait(self) -> int:
        """Its exit status."""
        return self._process.wait(WITHIN_S)

    def succeed(self) -> None:
        """Wait for a good end."""
        assert self.wait() == 0, self.log[-3000:]

    def signal(self, number: signal.Signals) -> None:
        """Send it to every process of the group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the group at once."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None


def until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    """Return once `condition` holds; what it asks about is in other processes."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.02)
