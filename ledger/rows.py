"""Rows of the projections: what the events add up to. Frozen; `Row.key` is the primary key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

RunState = Literal["open", "closed"]
VersionState = Literal["reserved", "published", "skipped", "withdrawn", "rejected"]
ReplicaState = Literal["joined", "left", "lost"]
ResidencyState = Literal["fetched", "acked", "failed", "rejected", "evicted"]
Pin = Literal["", "keep", "serve"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a projection."""

    table: ClassVar[str]

    @property
    def key(self) -> tuple[str | int, ...]:
        """Primary key, in the order of the table's key columns."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LineRow(Row):
    """A line: the counters that never go back, and what is current on it."""

    table: ClassVar[str] = "lines"

    line: str
    next_version: int = 1
    epoch: int = 0
    open_run: str | None = None
    current: int | None = None
    candidate: int | None = None
    paused: bool = False

    @property
    def key(self) -> tuple[str]:
        """Primary key."""
        return (self.line,)


@dataclass(frozen=True, slots=True)
class RunRow(Row):
    """A training run and its rules of readiness."""

    table: ClassVar[str] = "runs"

    run: str
    line: str
    state: RunState
    epoch: int
    holder: str | None
    """Actor that holds the epoch; None when it was released or bumped by a rollback."""
    claimed_at: str
    max_staleness: int
    min_ready: int | None
    """How many replicas must ack before the grace counts; None means all of them."""
    ready_grace_s: float
    candidate_timeout_s: float
    opened_seq: int
    opened_at: str
    closed_seq: int | None
    parent_run: str | None
    parent_version: int | None

    @property
    def key(self) -> tuple[str]:
        """Primary key: a run's name is unique in the ledger."""
        return (self.run,)


@dataclass(frozen=True, slots=True)
class VersionRow(Row):
    """A version number and what became of it."""

    table: ClassVar[str] = "versions"

    line: str
    version: int
    run: str
    epoch: int
    attempt: str
    state: VersionState
    publisher: str
    reserved_seq: int
    digest: str | None = None
    size_bytes: int | None = None
    manifest: str | None = None
    published_seq: int | None = None
    published_at: str | None = None
    became_current_seq: int | None = None
    reason: str = ""
    """Why it is skipped, withdrawn or rejected."""
    pin: Pin = ""
    collected: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Primary key."""
        return (self.line, self.version)


@dataclass(frozen=True, slots=True)
class ReplicaRow(Row):
    """One vLLM server and its watcher."""

    table: ClassVar[str] = "replicas"

    line: str
    replica: str
    generation: int
    state: ReplicaState
    incarnation: str | None
    url: str
    build: str
    max_loras: int | None
    joined_seq: int
    joined_at: str
    reason: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Primary key."""
        return (self.line, self.replica)


@dataclass(frozen=True, slots=True)
class ResidencyRow(Row):
    """What was last reported about one version on one replica."""

    table: ClassVar[str] = "residency"

    line: str
    replica: str
    version: int
    state: ResidencyState
    generation: int
    incarnation: str | None
    digest: str
    build: str = ""
    probe: str = ""
    """JSON list of the probe's log-probabilities (natural log), as acked."""
    fetched_at: str | None = None
    acked_seq: int | None = None
    acked_at: str | None = None
    evicted_seq: int | None = None
    evicted_at: str | None = None
    failures: int = 0
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Primary key."""
        return (self.line, self.replica, self.version)


ROW_TYPES: tuple[type[Row], ...] = (LineRow, RunRow, VersionRow, ReplicaRow, ResidencyRow)
