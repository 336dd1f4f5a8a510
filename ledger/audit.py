"""Audit: the full story of one version."""

from __future__ import annotations

from collections import defaultdict
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


def audit(ledger: Reads, line: str, version: int) -> VersionAudit:
    """Tell who published a version and when, and who served it from when to when.

    Raises:
        NotFound: never reserved on this line.
    """
    row = ledger.version(line, version)
    own = list(ledger.events(line=line, version=version))
    ends = _ends(ledger, line, own)
    return VersionAudit(
        row=row,
        name=policy_name(line, version),
        servings=tuple(_servings(own, ends)),
        events=tuple(own),
        phases=tuple(ledger.phases(line=line, version=version)),
    )


def _ends(ledger: Reads, line: str, own: list[Event]) -> dict[str, list[Event]]:
    """Per replica the events that end what its incarnation served, after the first ack."""
    ends: dict[str, list[Event]] = defaultdict(list)
    acks = [e for e in own if e.kind == kinds.VERSION_ACKED]
    if not acks:
        return ends
    concerned = {e.replica for e in acks}
    for event in ledger.events(
        line=line,
        after=acks[0].seq,
        kinds=(
            kinds.INCARNATION_CHANGED,
            kinds.REPLICA_JOINED,
            kinds.REPLICA_LEFT,
            kinds.REPLICA_LOST,
        ),
    ):
        if event.replica in concerned and event.replica is not None:
            ends[event.replica].append(event)
    for event in own:
        if event.kind == kinds.VERSION_EVICTED and event.replica is not None:
            ends[event.replica].append(event)
    return ends


def _servings(own: list[Event], ends: dict[str, list[Event]]) -> list[Serving]:
    servings = []
    for ack in own:
        if ack.kind != kinds.VERSION_ACKED or ack.replica is None:
            continue
        incarnation = str(ack.data["incarnation"])
        after = sorted(
            (e for e in ends.get(ack.replica, []) if e.seq > ack.seq and _ends_it(e, incarnation)),
            key=lambda e: e.seq,
        )
        end = after[0] if after else None
        servings.append(
            Serving(
                replica=ack.replica,
                incarnation=incarnation,
                acked_at=ack.recorded_at,
                acked_seq=ack.seq,
                ended_at=end.recorded_at if end else None,
                ended_by=end.kind.replace("_", " ") if end else None,
            )
        )
    return servings


def _ends_it(event: Event, incarnation: str) -> bool:
    """A watcher that rejoins and finds the same incarnation does not end what it serves."""
    if event.kind == kinds.REPLICA_JOINED:
        return bool(event.data["incarnation"] != incarnation)
    return True
