"""Export and import: a ledger as lines of JSON, and back, with the same hashes.

The first line is a header. Then every event in order, phases, and rollouts; projections and
checkpoints are not exported: they are folded again, so that an import is also a verification.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.checkpoint import CHECKPOINT_EVERY, line_states
from policyline.ledger.db import schema
from policyline.ledger.disk_projections import DiskProjections
from policyline.ledger.errors import VERIFY_HINT, Corrupted, LedgerError, Refused
from policyline.ledger.events import GENESIS_HASH, Event, event_hash, has_its_hash
from policyline.ledger.fold import apply
from policyline.ledger.read.queries import Queries
from policyline.ledger.rollouts import RolloutFilter
from policyline.ledger.rows import ROW_TYPES
from policyline.ledger.store import Ledger

FORMAT = "policyline-ledger/1"
_BATCH = 2000
_ANOTHER_COPY = "take another copy of the file, or run: policyline ledger export again"


def export(ledger: Queries) -> Iterator[str]:
    """The ledger's lines, without line ends; a consistent prefix while writers go on."""
    head_seq, head_hash, last_rollout = ledger.extent()
    phases, rollouts = ledger.recorded(until=head_seq, last=last_rollout)
    yield _line(
        {
            "format": FORMAT,
            "schema": schema.SCHEMA_REVISION,
            "ledger_id": ledger.view("-").ledger_id,
            "events": head_seq,
            "head": head_hash,
            "phases": phases,
            "rollouts": rollouts,
        }
    )
    for event in ledger.events(last=head_seq):
        yield _line({"event": [getattr(event, name) for name in Event.__slots__]})
    for phase in ledger.phase_rows(until=head_seq):
        yield _line({"phase": phase})
    for rollout in ledger.rollouts(RolloutFilter(), last=last_rollout):
        row = asdict(rollout)
        del row["id"]
        yield _line({"rollout": row})


def import_into(
    ledger: Ledger, lines: Iterable[str], *, on_progress: Callable[[int], None] = lambda _n: None
) -> int:
    """Fill an empty ledger, in one transaction: all or nothing.

    Returns:
        The number of events.

    Raises:
        Refused: the ledger is not empty, or the text is no export of this format.
        Corrupted: the chain does not hold, or the export was cut off; names line and event.
    """
    source = iter(lines)
    header = _header(next(source, ""))
    with ledger.exclusive() as connection:
        if connection.execute(sa.select(schema.head.c.seq)).scalar() != 0:
            raise Refused(
                f"ledger {ledger.shown_url} is not empty",
                hint="import into a new one: policyline ledger upgrade --ledger NEW",
            )
        with DiskProjections() as tables:
            loader = _Loader(connection, tables, on_progress)
            for number, text in enumerate(source, start=2):
                loader.take(number, text)
            loader.finish(header)
    return loader.count


class _Loader:
    """Checks and inserts in batches; memory is bounded."""

    def __init__(
        self, connection: Connection, tables: DiskProjections, on_progress: Callable[[int], None]
    ) -> None:
        self._connection = connection
        self._on_progress = on_progress
        self._tables = tables
        self._batches: dict[str, list[tuple[Any, ...]]] = {"event": [], "phase": [], "rollout": []}
        self._last = (0, GENESIS_HASH, "")
        self._taken = dict.fromkeys(self._batches, 0)

    @property
    def count(self) -> int:
        """Events so far."""
        return self._taken["event"]

    def take(self, number: int, text: str) -> None:
        """One line of the export."""
        try:
            ((kind, value),) = json.loads(text).items()
            batch = self._batches[kind]
            if kind == "event":
                event = Event(*value)
                self._check(number, event)
                batch.append(tuple(value))
            else:
                batch.append(_VALUES[kind](value))
        except LedgerError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(
                f"line {number} is not a line of an export ({error!r:.100})", hint=_ANOTHER_COPY
            ) from error
        self._taken[kind] += 1
        if len(batch) >= _BATCH:
            self._flush(kind)

    def _check(self, number: int, event: Event) -> None:
        seq, previous, _ = self._last
        if event.seq != seq + 1 or event.prev_hash != previous or event_hash(event) != event.hash:
            raise Corrupted(
                f"line {number}: event {event.seq} does not continue the chain after event {seq}",
                seq=event.seq,
                hint=_ANOTHER_COPY,
            )
        apply(self._tables, event)
        if event.seq % CHECKPOINT_EVERY == 0:
            insert_checkpoints(self._connection, self._tables, event.seq)
            self._on_progress(event.seq)
        self._last = (event.seq, event.hash, event.recorded_at)

    def _flush(self, kind: str) -> None:
        insert_rows(self._connection, _TABLES[kind], _NAMES[kind], self._batches[kind])
        self._batches[kind] = []

    def finish(self, header: dict[str, Any]) -> None:
        """Insert what is left and the projections; compare with the header."""
        for kind in self._batches:
            self._flush(kind)
        seq, last_hash, recorded_at = self._last
        if (seq, last_hash) != (header["events"], header["head"] if seq else GENESIS_HASH):
            raise Corrupted(
                f"the export ends at event {seq}, its header promises {header['events']}: it was "
                "cut off",
                seq=seq,
                hint=_ANOTHER_COPY,
            )
        for kind in ("phase", "rollout"):
            promised = header.get(f"{kind}s", self._taken[kind])  # older exports have no such count
            if self._taken[kind] != promised:
                raise Corrupted(
                    f"the export holds {self._taken[kind]} {kind}s, its header promises "
                    f"{promised}: it was cut off",
                    hint=_ANOTHER_COPY,
                )
        insert_projections(self._connection, self._tables)
        self._connection.execute(_STILL)
        values = {"ledger_id": header["ledger_id"], "seq": seq, "hash": last_hash}
        if seq:
            values["recorded_at"] = recorded_at
        self._connection.execute(sa.update(schema.head).values(values))


_TABLES: Final = {"event": schema.events, "phase": schema.phases, "rollout": schema.rollouts}
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    kind: Event.__slots__ if kind == "event" else tuple(c.name for c in t.columns if c.name != "id")
    for kind, t in _TABLES.items()
}
_VALUES: Final = {kind: itemgetter(*names) for kind, names in _NAMES.items()}


_STILL: Final = sa.insert(schema.heartbeats).from_select(
    ["line", "replica", "generation", "counter"],
    sa.select(
        schema.replicas.c.line,
        schema.replicas.c.replica,
        schema.replicas.c.generation,
        sa.literal(0),
    ).where(schema.replicas.c.state == "joined"),
)
"""Heartbeats at their beginning, which no export holds: one that does not come here is then seen
to stand still, and declared lost."""


def insert_projections(connection: Connection, tables: DiskProjections) -> None:
    """Write folded rows into empty projection tables, in batches."""
    for table in ROW_TYPES:
        names = [f.name for f in fields(table)]
        values_of = attrgetter(*names)
        rows = map(values_of, tables.rows(table))
        while batch := list(islice(rows, _BATCH)):
            insert_rows(connection, schema.PROJECTIONS[table], names, batch)


def insert_rows(
    connection: Connection, table: sa.Table, names: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> None:
    """Insert many rows as fast as the driver can: with COPY on Postgres."""
    if not rows:
        return
    columns = ", ".join(connection.dialect.identifier_preparer.quote(name) for name in names)
    cursor: Any = connection.connection.cursor()
    try:
        if connection.dialect.name == "sqlite":
            marks = ", ".join("?" * len(names))
            cursor.executemany(f"INSERT INTO {table.name} ({columns}) VALUES ({marks})", rows)  # noqa: S608 - our own
        else:
            with cursor.copy(f"COPY {table.name} ({columns}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
    finally:
        cursor.close()


def repair_projections(ledger: Ledger) -> int:
    """Empty the projections and checkpoints and fold every event again, in one transaction.

    Returns:
        The number of events folded.

    Raises:
        Corrupted: the chain does not hold, or an event cannot be folded; nothing was changed.
    """
    last = (0, GENESIS_HASH, "")
    with ledger.exclusive() as connection, DiskProjections() as tables:
        for table in (*schema.PROJECTIONS.values(), schema.checkpoints):
            connection.execute(sa.delete(table))
        for event in ledger.all_events(connection=connection):
            _check_follows(event, *last[:2])
            apply(tables, event)
            last = event.seq, event.hash, event.recorded_at
            if event.seq % CHECKPOINT_EVERY == 0:
                insert_checkpoints(connection, tables, event.seq)
        insert_projections(connection, tables)
        _mend_head(connection, *last)
    return last[0]


def _check_follows(event: Event, seq: int, previous: str) -> None:
    """Projections made of changed events would hide the change."""
    if event.seq != seq + 1 or event.prev_hash != previous or not has_its_hash(event):
        raise Corrupted(
            f"the chain does not hold at event {seq + 1}; nothing was rebuilt",
            seq=seq + 1,
            hint=VERIFY_HINT,
        )


def _mend_head(connection: Connection, seq: int, last_hash: str, time: str) -> None:
    """The head's time is the last event's; that it names another event cannot be mended."""
    found = connection.execute(sa.select(schema.head.c.seq, schema.head.c.hash)).one()
    if tuple(found) != (seq, last_hash):
        raise Corrupted(
            f"the head counts {found.seq} events, the chain ends at {seq}; nothing was rebuilt",
            seq=seq + 1,
            hint=VERIFY_HINT,
        )
    if seq:
        connection.execute(sa.update(schema.head).values(recorded_at=time))


def insert_checkpoints(connection: Connection, tables: DiskProjections, seq: int) -> None:
    """Note what each line serves after event `seq`."""
    rows = [
        {"line": line, "seq": seq, "state": state} for line, state in line_states(tables).items()
    ]
    if rows:
        connection.execute(sa.insert(schema.checkpoints), rows)


def _header(text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
        found = header["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(
            "the text is not an export of a ledger", hint="make one: policyline ledger export FILE"
        ) from error
    if found != FORMAT:
        raise Refused(f"the export has format {found!r:.40}, this release reads {FORMAT}")
    return dict(header)


def _line(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except TypeError as error:
        (kind,) = value
        raise Corrupted(
            f"a column of {kind} {value[kind]!s:.100} holds what no ledger writes: {error}",
            hint=VERIFY_HINT,
        ) from error
