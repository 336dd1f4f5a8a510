"""Runs the command as a user would, and finds every process that it leaves behind."""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from policyline.demo.fleet import Fleet
from policyline.demo.settings import DemoSettings
from policyline.engines.child import ChildServer

MARK = "POLICYLINE_TEST_MARK"


class FleetOn(Fleet):
    """A fleet on servers that run already, and that it leaves running.

    Args:
        settings: of the demo.
        servers: one for each replica.
    """

    def __init__(self, settings: DemoSettings, servers: Sequence[ChildServer]) -> None:
        super().__init__(settings)
        self._servers = dict(zip(settings.replica_names, servers, strict=True))

    def start_engines(self) -> None:
        """They run."""
        self.engines = dict(self._servers)

    def stop(self) -> None:
        """Stop the sidecars."""
        self.engines = {}
        super().stop()


@dataclass
class Command:
    """`python -m policyline` with an environment variable that all its descendants inherit."""

    tmp: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark, "TMPDIR": str(self.tmp)}

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "policyline", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def left(self) -> list[psutil.Process]:
        """Every living process of this command."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def command() -> Iterator[Command]:
    # a short path: vLLM makes a socket in it, whose path may have 107 bytes
    with tempfile.TemporaryDirectory(prefix="pl-") as tmp:
        made = Command(Path(tmp))
        yield made
        for process in made.left():
            process.kill()
