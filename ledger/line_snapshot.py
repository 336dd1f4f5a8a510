"""One line at one event: what is desired, and what the replicas reported. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policyline.ledger.manifest import Manifest
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, RunRow, VersionRow

Role = Literal["current", "candidate", "window", "pinned"]


@dataclass(frozen=True, slots=True)
class DesiredVersion:
    """A version that every replica of the line should serve, and why."""

    version: int
    name: str
    digest: str
    role: Role
    row: VersionRow

    @property
    def manifest(self) -> Manifest:
        """The manifest, parsed and distrusted.

        Raises:
            ManifestInvalid: it must not be believed.
        """
        return Manifest.from_text(self.row.manifest or "")


@dataclass(frozen=True, slots=True)
class LineSnapshot:
    """One line at one event: everything a watcher or router decides from."""

    ledger_id: str
    seq: int
    line: LineRow
    run: RunRow | None
    """The open run; None when there is none."""
    desired: tuple[DesiredVersion, ...]
    """In the order in which to load: current, candidate, then the window from new to old."""
    replicas: dict[str, ReplicaRow] = field(default_factory=dict)
    residency: dict[tuple[str, int], ResidencyRow] = field(default_factory=dict)
    """(replica, version) -> what it last reported; for desired and asked-for versions. For one
    replica alone: its own, and what the others reported about the candidate."""
    others: dict[int, VersionRow] = field(default_factory=dict)
    """The asked-for versions that are in the ledger but not desired; without their manifests, which
    are needed only to serve a version: a watcher asks about a hundred of them at a time."""

    @property
    def current(self) -> int | None:
        """The version that new rollouts should ask for."""
        return self.line.current

    @property
    def candidate(self) -> int | None:
        """The version on its way to become current."""
        return self.line.candidate

    def acked_by(self, version: int) -> tuple[str, ...]:
        """Replicas whose present incarnation holds an ack for the version (I2)."""
        return tuple(
            name
            for name, replica in sorted(self.replicas.items())
            if is_acked(replica, self.residency.get((name, version)))
        )
