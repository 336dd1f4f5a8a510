"""Unit of work: the events and projections inside one write transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy.engine import Dialect

from policyline.ledger import events as kinds
from policyline.ledger import fold
from policyline.ledger.checkpoint import CHECKPOINT_EVERY, checkpoint_text
from policyline.ledger.db import schema, statements
from policyline.ledger.db.signals import ChangeKind
from policyline.ledger.db.statements import R, row_of
from policyline.ledger.db.transaction import Statement, Transaction
from policyline.ledger.errors import REPAIR_HINT, Conflict, Corrupted
from policyline.ledger.events import Event, NewEvent, seal
from policyline.ledger.rollouts import HASHED_FIELDS, NewRollout
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, Row, VersionRow

RowId = tuple[type[Row], tuple[str | int, ...]]
"""A projection and the primary key of one of its rows."""

_LIVE = statements.scan(
    ReplicaRow,
    schema.replicas.c.line == statements.bind("line"),
    schema.replicas.c.state == "joined",
)
_RESIDENCY = statements.scan(
    ResidencyRow,
    schema.residency.c.line == statements.bind("line"),
    schema.residency.c.version == statements.bind("version"),
)
_ACKS_IN_FORCE = statements.scan(
    ResidencyRow,
    schema.residency.c.line == statements.bind("line"),
    schema.residency.c.replica == statements.bind("replica"),
    schema.residency.c.state == statements.constant("acked"),
    schema.residency.c.incarnation == statements.bind("incarnation"),
)
_WAITING = statements.scan(
    VersionRow,
    schema.versions.c.run == statements.bind("run"),
    schema.versions.c.state == statements.constant("published"),
    schema.versions.c.became_current_seq.is_(None),
)

_LINES = statements.scan(LineRow)
_ACKED = statements.scan(
    ResidencyRow,
    schema.residency.c.line == statements.bind("line"),
    schema.residency.c.state == statements.constant("acked"),
)
_AFTER = statements.scan(
    VersionRow,
    schema.versions.c.line == statements.bind("line"),
    schema.versions.c.version > statements.bind("after"),
    schema.versions.c.state.in_([statements.constant("published"), statements.constant("skipped")]),
)


class UnitOfWork:
    """One write transaction: append events, fold them, read and write rows.

    Rows are read once, since nobody else writes while the lock is held; everything written goes to
    the database at `commit`, in one round trip where the driver can.
    """

    def __init__(self, transaction: Transaction, dialect: Dialect, now: str) -> None:
        self._transaction = transaction
        self._dialect = dialect
        self._rows: dict[RowId, Row | None] = {}
        self._dirty: dict[RowId, Row] = {}
        self._writes: list[Statement] = []
        self._found: dict[str, Event | None] = {}
        self._now = now
        self.appended: list[Event] = []

    def get(self, table: type[R], key: tuple[str | int, ...]) -> R | None:
        """The row as this transaction sees it, or None."""
        row_id = (table, key)
        if row_id not in self._rows:
            self.prefetch(row_id)
        row = self._rows[row_id]
        return row if isinstance(row, table) else None

    def prefetch(self, *row_ids: RowId) -> None:
        """Read rows that will be needed, in one round trip where the driver can."""
        missing = [row_id for row_id in row_ids if row_id not in self._rows]
        if not missing:
            return
        results = self._transaction.query(
            [
                (
                    statements.ROW_BY_KEY[table],
                    dict(zip(statements.KEY_NAMES[table], key, strict=True)),
                )
                for table, key in missing
            ]
        )
        for (table, key), rows in zip(missing, results, strict=True):
            self._rows[table, key] = row_of(table, rows[0]) if rows else None

    def put(self, row: Row) -> None:
        """Insert or replace the row, at the commit."""
        row_id = (type(row), row.key)
        self._rows[row_id] = row
        self._dirty[row_id] = row

    def find(self, key: str) -> Event | None:
        """The event with this idempotency key."""
        if key not in self._found:
            (rows,) = self._transaction.query([(statements.EVENT_BY_KEY, {"key": key})])
            self._found[key] = Event(*rows[0]) if rows else None
        return self._found[key]

    def append(self, new: NewEvent, *, may_exist: bool = False) -> Event:
        """Append and fold.

        Args:
            new: the event.
            may_exist: the key may have been used before; the same fact under the same key again
                changes nothing. False for keys that are unique by construction.

        Raises:
            Conflict: the key exists with another fact.
        """
        earlier = self.find(new.key) if may_exist else None
        if earlier is not None:
            if not earlier.is_the_same_fact(new):
                raise Conflict(
                    f"key {new.key!r} was used by event {earlier.seq} ({earlier.kind}) with "
                    "other content"
                )
            return earlier
        seq, previous, time = self._last()
        event = seal(new, seq=seq + 1, recorded_at=_not_before(time, self._now), prev_hash=previous)
        self._writes.append((statements.INSERT_EVENT, asdict(event)))
        self.appended.append(event)
        fold.apply(self, event)
        return event

    def _last(self) -> tuple[int, str, str]:
        """seq, hash and time of the event that the next one follows."""
        if self.appended:
            last = self.appended[-1]
            return last.seq, last.hash, last.recorded_at
        return self._transaction.head[1:]

    def add_phases(
        self, event: Event, source: str, phases: Mapping[str, float], *, run: str | None = None
    ) -> None:
        """Record how long each phase of the event's version took, in seconds."""
        if event not in self.appended:
            return
        for phase, duration_s in phases.items():
            values = {
                "seq": event.seq,
                "line": event.line,
                "run": event.run if run is None else run,
                "version": event.version,
                "source": source,
                "phase": phase,
                "duration_s": duration_s,
            }
            self._writes.append((statements.INSERT_PHASE, values))

    def add_rollouts(
        self, line: str, batch: str, rollouts: Sequence[NewRollout], current: int | None
    ) -> None:
        """Insert a batch."""
        for rollout in rollouts:
            values = {
                **{name: getattr(rollout, name) for name in HASHED_FIELDS},
                "line": line,
                "batch": batch,
                "staleness": None if current is None else current - rollout.version,
            }
            self._writes.append((statements.INSERT_ROLLOUT, values))

    def versions_after(self, line: str, version: int) -> list[int]:
        """Published or skipped versions of the line with a greater number, in order."""
        rows = self._scan(
            VersionRow,
            (_AFTER, {"line": line, "after": version}),
            lambda row: (
                row.line == line and row.version > version and row.state in {"published", "skipped"}
            ),
        )
        return sorted(row.version for row in rows)

    def epoch_event(self, line: str, epoch: int) -> Event | None:
        """The event that made `epoch` the line's present one."""
        values = {"line": line, "epoch": epoch}
        (rows,) = self._transaction.query([(statements.EVENT_OF_EPOCH, values)])
        return Event(*rows[0]) if rows else None

    def heartbeat(self, line: str, replica: str) -> tuple[int, int] | None:
        """(generation, counter), or None."""
        values = {"line": line, "replica": replica}
        (rows,) = self._transaction.query([(statements.READ_HEARTBEAT, values)])
        return (rows[0][0], rows[0][1]) if rows else None

    def set_heartbeat(self, line: str, replica: str, generation: int, counter: int) -> None:
        """Replace the counter."""
        values = {"line": line, "replica": replica, "generation": generation, "counter": counter}
        self._writes.append((statements.upsert(schema.heartbeats, self._dialect), values))

    def live_replicas(self, line: str) -> list[ReplicaRow]:
        """Replicas that are joined, by name."""
        rows = self._scan(
            ReplicaRow,
            (_LIVE, {"line": line}),
            lambda row: row.line == line and row.state == "joined",
        )
        return sorted(rows, key=lambda row: row.replica)

    def acks_in_force(self, line: str, replica: str, incarnation: str | None) -> list[ResidencyRow]:
        """The acks of a replica that are in force while it runs `incarnation`, by version."""
        if incarnation is None:
            return []
        rows = self._scan(
            ResidencyRow,
            (_ACKS_IN_FORCE, {"line": line, "replica": replica, "incarnation": incarnation}),
            lambda row: (
                (row.line, row.replica, row.incarnation) == (line, replica, incarnation)
                and row.state == "acked"
            ),
        )
        return sorted(rows, key=lambda row: row.version)

    def residency(self, line: str, version: int) -> dict[str, ResidencyRow]:
        """Replica -> what it last reported about the version."""
        rows = self._scan(
            ResidencyRow,
            (_RESIDENCY, {"line": line, "version": version}),
            lambda row: row.line == line and row.version == version,
        )
        return {row.replica: row for row in rows}

    def waiting_versions(self, run: str) -> list[int]:
        """Published versions of the run that were never current or skipped, by number."""
        rows = self._scan(
            VersionRow,
            (_WAITING, {"run": run}),
            lambda row: (
                row.run == run and row.state == "published" and row.became_current_seq is None
            ),
        )
        return sorted(row.version for row in rows)

    def commit(self) -> None:
        """Write everything that was appended, and raise the signal where the database does that."""
        last = self.appended[-1]
        moved = {"to_seq": last.seq, "to_hash": last.hash, "to_time": last.recorded_at}
        self._writes.insert(0, (statements.MOVE_HEAD, moved))
        for row in self._dirty.values():
            table = schema.PROJECTIONS[type(row)]
            self._writes.append((statements.upsert(table, self._dialect), asdict(row)))
        if self._crosses_checkpoint():
            self._write_checkpoints()
        is_detail = all(event.kind in kinds.DETAILS for event in self.appended)
        change: ChangeKind = "detail" if is_detail else "desired"
        self._transaction.commit(self._writes, change=change)

    def _crosses_checkpoint(self) -> bool:
        before = self.appended[0].seq - 1
        return before // CHECKPOINT_EVERY != self.appended[-1].seq // CHECKPOINT_EVERY

    def _write_checkpoints(self) -> None:
        """Write what each line serves, for as-of. Derived from the events."""
        for line in self._scan(LineRow, (_LINES, {}), lambda _row: True):
            replicas = self.live_replicas(line.line)
            acked = self._scan(
                ResidencyRow,
                (_ACKED, {"line": line.line}),
                lambda row: row.state == "acked",
            )
            state = checkpoint_text(line, replicas, [r for r in acked if r.line == line.line])
            values = {"line": line.line, "seq": self.appended[-1].seq, "state": state}
            self._writes.append((statements.upsert(schema.checkpoints, self._dialect), values))

    def _scan(self, table: type[R], statement: Statement, matches: Callable[[R], bool]) -> list[R]:
        """What the database finds, as changed by this transaction."""
        (found,) = self._transaction.query([statement])
        rows = {row.key: row for row in (row_of(table, values) for values in found)}
        for (kind, key), dirty in self._dirty.items():
            if kind is table:
                rows.pop(key, None)
                if isinstance(dirty, table) and matches(dirty):
                    rows[key] = dirty
        return list(rows.values())


def _not_before(previous: str, now: str) -> str:
    """The time to record: a clock that was set back moves nothing back.

    Raises:
        Corrupted: the last event's time is unreadable; the next event would inherit it.
    """
    if now >= previous:
        return now
    try:
        datetime.fromisoformat(previous)
    except ValueError as error:
        raise Corrupted(
            f"the head's time is {previous!r:.40}, which is no time", hint=REPAIR_HINT
        ) from error
    return previous
