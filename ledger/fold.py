"""The fold: what each event does to the projections. Pure but for the tables it is given.

The same code runs inside the append (tables = rows in the transaction), in `replay` and in
`verify` (tables = memory), so that they cannot drift apart (I7). A handler reads and writes rows
by their key only: no scan, so folding a million events needs no index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from policyline.ledger import events as kinds
from policyline.ledger.errors import VERIFY_HINT, Corrupted
from policyline.ledger.events import Event
from policyline.ledger.projection_store import ProjectionStore, R
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import (
    LineRow,
    Pin,
    ReplicaRow,
    ResidencyRow,
    Row,
    RunRow,
    VersionRow,
)

_Handler = Callable[[ProjectionStore, Event, dict[str, Any]], None]


def apply(tables: ProjectionStore, event: Event) -> None:
    """Fold one event into the tables. An unknown kind changes nothing, but stays among the events.

    Raises:
        Corrupted: the event refers to a row that no earlier event made, or lacks what its kind
            needs; names the event.
    """
    handler = _HANDLERS.get(event.kind)
    if handler is None:
        return
    try:
        _check_numbers(event)
        handler(tables, event, event.data)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupted(
            f"event {event.seq} ({event.kind}) cannot be folded: {error!r}",
            seq=event.seq,
            hint=VERIFY_HINT,
        ) from error


def _check_numbers(event: Event) -> None:
    """SQLite accepts text in a column of numbers, if somebody writes it there."""
    if not {type(event.version), type(event.epoch), type(event.generation)} <= _NUMBERS:
        raise TypeError("version, epoch or generation is no number")


_NUMBERS = {int, type(None)}


def _need(tables: ProjectionStore, table: type[R], key: tuple[str | int, ...], event: Event) -> R:
    row = tables.get(table, key)
    if row is None:
        raise Corrupted(
            f"event {event.seq} ({event.kind}) refers to {table.table} {key}, "
            "which no earlier event made",
            seq=event.seq,
        )
    return row


def _line(tables: ProjectionStore, event: Event) -> LineRow:
    return tables.get(LineRow, (event.line,)) or LineRow(line=event.line)


def _run(tables: ProjectionStore, event: Event) -> RunRow:
    return _need(tables, RunRow, (event.run,), event)


def _version(tables: ProjectionStore, event: Event, version: int | None = None) -> VersionRow:
    number = event.version if version is None else version
    return _need(tables, VersionRow, (event.line, number or 0), event)


def _replica(tables: ProjectionStore, event: Event) -> ReplicaRow:
    return _need(tables, ReplicaRow, (event.line, event.replica or ""), event)


def _run_opened(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    line = _line(tables, event)
    if data["closes"] is not None:
        former = _need(tables, RunRow, (data["closes"],), event)
        tables.put(replace(former, state="closed", closed_seq=event.seq, holder=None))
    tables.put(replace(line, open_run=event.run, epoch=event.epoch or 0, candidate=None))
    tables.put(
        RunRow(
            run=event.run,
            line=event.line,
            state="open",
            epoch=event.epoch or 0,
            holder=data["holder"],
            claimed_at=event.recorded_at,
            max_staleness=data["max_staleness"],
            min_ready=data["min_ready"],
            ready_grace_s=data["ready_grace_s"],
            candidate_timeout_s=data["candidate_timeout_s"],
            opened_seq=event.seq,
            opened_at=event.recorded_at,
            closed_seq=None,
            parent_run=data["parent_run"],
            parent_version=data["parent_version"],
        )
    )


def _run_closed(tables: ProjectionStore, event: Event, _data: dict[str, Any]) -> None:
    run = _run(tables, event)
    tables.put(replace(run, state="closed", closed_seq=event.seq, holder=None))
    tables.put(replace(_line(tables, event), open_run=None, candidate=None))


def _epoch_claimed(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    run = _run(tables, event)
    epoch = event.epoch or 0
    tables.put(replace(run, epoch=epoch, holder=data["holder"], claimed_at=event.recorded_at))
    tables.put(replace(_line(tables, event), epoch=epoch))


def _version_reserved(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    line = _line(tables, event)
    version = event.version or 0
    tables.put(replace(line, next_version=max(line.next_version, version + 1)))
    tables.put(
        VersionRow(
            line=event.line,
            version=version,
            run=event.run,
            epoch=event.epoch or 0,
            attempt=data["attempt"],
            state="reserved",
            publisher=event.actor,
            reserved_seq=event.seq,
        )
    )


def _version_published(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    tables.put(
        replace(
            _version(tables, event),
            state="published",
            digest=data["digest"],
            size_bytes=data["size_bytes"],
            manifest=data["manifest"],
            published_seq=event.seq,
            published_at=event.recorded_at,
        )
    )


def _version_withdrawn(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    tables.put(replace(_version(tables, event), state="withdrawn", reason=data["reason"]))
    line = _line(tables, event)
    if line.candidate == event.version:
        tables.put(replace(line, candidate=None))


def _candidate_named(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    for skipped in data["skipped"]:
        row = _version(tables, event, skipped)
        tables.put(replace(row, state="skipped", reason=f"superseded by version {event.version}"))
    tables.put(replace(_line(tables, event), candidate=event.version))


def _current_advanced(tables: ProjectionStore, event: Event, _data: dict[str, Any]) -> None:
    line = _line(tables, event)
    candidate = None if line.candidate == event.version else line.candidate
    tables.put(replace(line, current=event.version, candidate=candidate))
    tables.put(replace(_version(tables, event), became_current_seq=event.seq))


def _current_rolled_back(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    for withdrawn in data["withdrawn"]:
        row = _version(tables, event, withdrawn)
        tables.put(replace(row, state="withdrawn", reason=data["reason"]))
    tables.put(
        replace(
            _line(tables, event),
            current=event.version,
            candidate=None,
            epoch=event.epoch or 0,
        )
    )
    tables.put(replace(_version(tables, event), became_current_seq=event.seq))
    run = _run(tables, event)
    tables.put(replace(run, epoch=event.epoch or 0, holder=None, claimed_at=event.recorded_at))


def _replica_joined(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    tables.put(
        ReplicaRow(
            line=event.line,
            replica=event.replica or "",
            generation=event.generation or 0,
            state="joined",
            incarnation=data["incarnation"],
            url=data["url"],
            build=data["build"],
            max_loras=data["max_loras"],
            joined_seq=event.seq,
            joined_at=event.recorded_at,
        )
    )


def _residency(tables: ProjectionStore, event: Event) -> ResidencyRow:
    """The row of the version on the replica; an empty one before the first event."""
    key = (event.line, event.replica or "", event.version or 0)
    return tables.get(ResidencyRow, key) or ResidencyRow(
        *key, state="fetched", generation=0, incarnation=None, digest=""
    )


def _version_fetched(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    row = _residency(tables, event)
    # a second copy changes nothing on the engine
    stays_acked = is_acked(_replica(tables, event), row)
    tables.put(
        replace(
            row,
            state=row.state if stays_acked else "fetched",
            generation=event.generation or 0,
            digest=data["digest"],
            fetched_at=event.recorded_at,
            reason=row.reason if stays_acked else "",
        )
    )


def _version_acked(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    tables.put(
        replace(
            _residency(tables, event),
            state="acked",
            generation=event.generation or 0,
            incarnation=data["incarnation"],
            digest=data["digest"],
            build=data["build"],
            probe=data["probe"],
            acked_seq=event.seq,
            acked_at=event.recorded_at,
            evicted_seq=None,
            evicted_at=None,
            failures=0,
            reason="",
        )
    )


def _version_load_failed(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    row = _residency(tables, event)
    tables.put(
        replace(
            row,
            state="rejected" if data["permanent"] else "failed",
            generation=event.generation or 0,
            digest=data["digest"],
            failures=row.failures + 1,
            reason=data["reason"],
        )
    )


def _version_evicted(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    tables.put(
        replace(
            _residency(tables, event),
            state="evicted",
            generation=event.generation or 0,
            digest=data["digest"],
            evicted_seq=event.seq,
            evicted_at=event.recorded_at,
            reason=data["reason"],
        )
    )


def _version_pinned(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
    pin: Pin = "serve" if data["serve"] else "keep"
    tables.put(replace(_version(tables, event), pin=pin))


def _sets(
    find: Callable[[ProjectionStore, Event], Row], *from_data: str, **constant: object
) -> _Handler:
    """A handler that only changes columns of one row: to constants, or to what the event holds."""

    def handler(tables: ProjectionStore, event: Event, data: dict[str, Any]) -> None:
        row = find(tables, event)
        changes: dict[str, Any] = {**constant, **{name: data[name] for name in from_data}}
        tables.put(replace(row, **changes))

    return handler


_HANDLERS: dict[str, _Handler] = {
    kinds.RUN_OPENED: _run_opened,
    kinds.RUN_CLOSED: _run_closed,
    kinds.EPOCH_CLAIMED: _epoch_claimed,
    kinds.EPOCH_RELEASED: _sets(_run, holder=None),
    kinds.VERSION_RESERVED: _version_reserved,
    kinds.VERSION_PUBLISHED: _version_published,
    kinds.VERSION_REJECTED: _sets(_version, "reason", state="rejected"),
    kinds.VERSION_WITHDRAWN: _version_withdrawn,
    kinds.CANDIDATE_NAMED: _candidate_named,
    kinds.CURRENT_ADVANCED: _current_advanced,
    kinds.CURRENT_ROLLED_BACK: _current_rolled_back,
    kinds.REPLICA_JOINED: _replica_joined,
    kinds.REPLICA_LEFT: _sets(_replica, "reason", state="left"),
    kinds.REPLICA_LOST: _sets(_replica, "reason", state="lost"),
    kinds.INCARNATION_CHANGED: _sets(_replica, "incarnation", "build", "max_loras"),
    kinds.VERSION_FETCHED: _version_fetched,
    kinds.VERSION_ACKED: _version_acked,
    kinds.VERSION_LOAD_FAILED: _version_load_failed,
    kinds.VERSION_EVICTED: _version_evicted,
    # as after a transient failure: the reason of the last attempt stays readable
    kinds.VERSION_RETRIED: _sets(_residency, state="failed", failures=0),
    kinds.VERSION_PINNED: _version_pinned,
    kinds.VERSION_UNPINNED: _sets(_version, pin=""),
    kinds.FLEET_PAUSED: _sets(_line, paused=True),
    kinds.FLEET_RESUMED: _sets(_line, paused=False),
    kinds.ARTIFACT_COLLECTED: _sets(_version, collected=True),
}
