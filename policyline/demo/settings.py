"""What a demo is asked for, and where it keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from policyline.ledger.names import DEFAULT_LINE


class EngineKind(StrEnum):
    """Which engine serves."""

    VLLM = "vllm"
    SIM = "sim"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One demo."""

    workdir: Path
    """Empty or new; everything the demo writes is in it."""
    engine: EngineKind = EngineKind.VLLM
    replicas: int = 2
    versions: int = 12
    max_staleness: int = 4
    line: str = DEFAULT_LINE
    run: str = "demo"

    @property
    def max_loras(self) -> int:
        """Slots of each engine: the window, its current, and the candidate."""
        return self.max_staleness + 2

    @property
    def replica_names(self) -> tuple[str, ...]:
        """r0, r1, ..."""
        return tuple(f"r{index}" for index in range(self.replicas))

    @property
    def model(self) -> Path:
        """The tiny base model."""
        return self.workdir / "model"

    @property
    def ledger(self) -> Path:
        """The ledger's SQLite file."""
        return self.workdir / "ledger.db"

    @property
    def storage(self) -> Path:
        """Where versions are published."""
        return self.workdir / "storage"

    @property
    def logs(self) -> Path:
        """The output of every child process, one file each."""
        return self.workdir / "logs"

    def cache(self, replica: str) -> Path:
        """The replica's own disk."""
        return self.workdir / "cache" / replica

    @property
    def adapters(self) -> Path:
        """What the trainer saved."""
        return self.workdir / "adapters"

    def adapter(self, number: int) -> Path:
        """The adapter that is published as the run's version `number`."""
        return self.adapters / f"adapter-{number}"
