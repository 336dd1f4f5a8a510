"""Settings of a demo, and the paths of its files."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.settings import RunSettings
from policyline.setting import Setting, check_bounds


class EngineKind(StrEnum):
    """Which engine serves."""

    VLLM = "vllm"
    SIM = "sim"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One demo."""

    workdir: Annotated[
        Path,
        Setting(
            "--workdir",
            "Where everything is written: a new or empty directory. Default: a temporary one.",
            variable="POLICYLINE_DEMO_WORKDIR",
            computed=True,
        ),
    ]
    engine: Annotated[
        EngineKind,
        Setting(
            "--engine",
            "Real vLLM on this CPU, or its double.",
            variable="POLICYLINE_DEMO_ENGINE",
        ),
    ] = EngineKind.VLLM
    replicas: Annotated[
        int,
        Setting(
            "--replicas",
            "Servers to start.",
            "replicas",
            minimum=1,
            variable="POLICYLINE_DEMO_REPLICAS",
        ),
    ] = 2
    versions: Annotated[
        int,
        Setting(
            "--versions",
            "Versions to publish.",
            "versions",
            minimum=1,
            variable="POLICYLINE_DEMO_VERSIONS",
        ),
    ] = 12
    max_staleness: Annotated[
        int,
        Setting(
            "--max-staleness",
            "How many versions before current stay served.",
            "versions",
            minimum=0,
            variable="POLICYLINE_DEMO_MAX_STALENESS",
        ),
    ] = RunSettings().max_staleness
    line: str = DEFAULT_LINE
    run: str = "demo"

    def __post_init__(self) -> None:
        check_bounds(self)

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
