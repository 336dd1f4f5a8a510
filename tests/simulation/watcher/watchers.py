"""One run of a sidecar, and what it knew when it last observed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from policyline.ledger.names import DEFAULT_LINE, parse_policy_name
from policyline.watcher import Sidecar
from tests.simulation.watcher.faulty import (
    SimulatedLedger,
)
from tests.simulation.watcher.lifeline import Lifeline
from tests.simulation.watcher.process import SimulatedClient


@dataclass
class Watcher:
    """One life of a sidecar."""

    replica: str
    cache: Path
    lifeline: Lifeline
    ledger: SimulatedLedger
    client: SimulatedClient
    sidecar: Sidecar
    task: asyncio.Task[None]
    reads: dict[str, bool] = field(default_factory=dict)
    """Path of the engine's answers that make a look, and whether the last one came."""
    is_stopping: bool = False

    @property
    def generation(self) -> int | None:
        """Of its joining; None before it has joined."""
        return self.sidecar._status.generation

    @property
    def looked(self) -> bool:
        """Whether both halves of the last look, and the last look at the ledger, succeeded."""
        engine = self.reads.get("/metrics", False) and self.reads.get("/v1/models", False)
        return engine and self.ledger.last_view is not None

    def stop(self) -> None:
        """As SIGTERM does."""
        self.is_stopping = True
        self.sidecar.stop()

    def wants(self, name: str) -> bool:
        """Whether a name was desired, and not given up here, when it last looked."""
        view = self.ledger.last_view
        number = parse_policy_name(DEFAULT_LINE, name)
        if view is None or number not in {d.version for d in view.desired}:
            return False
        reported = view.residency.get((self.replica, number))
        return reported is None or reported.state != "rejected"
