"""Audit: the full story of one version."""

from __future__ import annotations

from dataclasses import dataclass

from ledger import events as kinds
from ledger.events import Event
from ledger.names import policy_name
from ledger.reads import PhaseRow, Reads
from ledger.rows import VersionRow


@dataclass(frozen=True, slots=True)
class Serving:
    """One stretch of time in which one incarnation of a replica served the version."""

    replica: str
    incarnation: str
    acked_at: str
    acked_seq: int
    ended_at: str | None
    """None while it still serves."""
    ended_by: str | None
    """evicted, incarnation changed, replica left or lost."""


@dataclass(frozen=True, slots=True)
class VersionAudit:
    """Everything the ledger knows about a version."""

    row: VersionRow
    name: str
    servings: tuple[Serving, ...]
    events: tuple[Event, ...]
    phases: tuple[PhaseRow, ...]
    rollouts: dict[str, int]
    """Replica -> how many rollouts it answered from this version."""


_ENDS_A_VERSION = {kinds.VERSION_EVICTED, kinds.VERSION_LOAD_FAILED, kinds.VERSION_ACKED}
_PAGE = 20


def audit(ledger: Reads, line: str, version: int) -> VersionAudit:
    """Tell who published a version and when, and who served it from when to when.

    Raises:
        NotFound: never reserved on this line.
    """
    row = ledger.version(line, version)
    own = list(ledger.events(line=line, version=version))
    return VersionAudit(
        row=row,
        name=policy_name(line, version),
        servings=tuple(_serving(ledger, ack, own) for ack in own if _is_ack(ack)),
        events=tuple(own),
        phases=tuple(ledger.phases(line=line, version=version)),
        rollouts=ledger.rollout_counts(line, version),
    )


def _is_ack(event: Event) -> bool:
    return event.kind == kinds.VERSION_ACKED and event.replica is not None


def _serving(ledger: Reads, ack: Event, own: list[Event]) -> Serving:
    incarnation = str(ack.data["incarnation"])
    replica = ack.replica or ""
    ends = [
        event
        for event in own
        if event.seq > ack.seq and event.replica == replica and event.kind in _ENDS_A_VERSION
    ][:1]
    lifecycle = _end_of_incarnation(ledger, ack, incarnation)
    if lifecycle is not None:
        ends.append(lifecycle)
    end = min(ends, key=lambda event: event.seq, default=None)
    return Serving(
        replica=replica,
        incarnation=incarnation,
        acked_at=ack.recorded_at,
        acked_seq=ack.seq,
        ended_at=end.recorded_at if end else None,
        ended_by=end.kind.replace("_", " ") if end else None,
    )


def _end_of_incarnation(ledger: Reads, ack: Event, incarnation: str) -> Event | None:
    """The first event after the ack by which the replica is away or another process."""
    after = ack.seq
    while True:
        events = ledger.next_replica_events(ack.line, ack.replica or "", after, _PAGE)
        for event in events:
            if event.kind in {kinds.REPLICA_LEFT, kinds.REPLICA_LOST}:
                return event
            changes = {kinds.INCARNATION_CHANGED, kinds.REPLICA_JOINED}
            # a watcher that rejoins and finds the same process ends nothing
            if event.kind in changes and event.data["incarnation"] != incarnation:
                return event
        if len(events) < _PAGE:
            return None
        after = events[-1].seq
