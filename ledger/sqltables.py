"""The projections and the events inside one write transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import Connection
from sqlalchemy.engine.row import RowMapping

from ledger import fold, schema
from ledger.errors import Conflict
from ledger.events import Event, NewEvent, seal
from ledger.rows import (
    ReplicaRow,
    ResidencyRow,
    Row,
)

R = TypeVar("R", bound=Row)


def decode(table: type[R], mapping: RowMapping) -> R:
    """A projection row from its columns."""
    return table(**{f.name: mapping[f.name] for f in fields(table)})


def decode_event(mapping: RowMapping) -> Event:
    """An event from its columns."""
    return Event(**{name: mapping[name] for name in Event.__slots__})


def upsert(connection: Connection, table: sa.Table, values: Mapping[str, Any]) -> None:
    """Insert a row, or replace the one with the same primary key."""
    insert = sqlite_insert if connection.dialect.name == "sqlite" else postgres_insert
    key = [column.name for column in table.primary_key]
    statement = insert(table)
    rest = {name: statement.excluded[name] for name in values if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=rest), values)


def move_heartbeat(
    connection: Connection, line: str, replica: str, generation: int, counter: int
) -> bool:
    """Move the counter of a joined replica; False when it is not joined with `generation`."""
    beats, rows = schema.heartbeats, schema.replicas
    joined = sa.exists().where(
        rows.c.line == line,
        rows.c.replica == replica,
        rows.c.generation == generation,
        rows.c.state == "joined",
    )
    result = connection.execute(
        sa.update(beats)
        .where(beats.c.line == line, beats.c.replica == replica, joined)
        .values(generation=generation, counter=counter)
    )
    return result.rowcount == 1


class Journal:
    """One write transaction: append events, fold them, read and write rows.

    Rows that were read are kept, since nobody else writes while the lock is held; rows that were
    written go to the database at `flush`, which every scan does first.
    """

    def __init__(self, connection: Connection, now: str) -> None:
        self._connection = connection
        self._rows: dict[tuple[type[Row], tuple[str | int, ...]], Row | None] = {}
        self._dirty: dict[tuple[type[Row], tuple[str | int, ...]], Row] = {}
        head = connection.execute(sa.select(schema.head)).mappings().one()
        self._seq: int = head["seq"]
        self._hash: str = head["hash"]
        self._recorded_at: str = max(now, head["recorded_at"])
        self.appended: list[Event] = []

    def get(self, table: type[R], key: tuple[str | int, ...]) -> R | None:
        """The row as this transaction sees it, or None."""
        place = (table, key)
        if place not in self._rows:
            target = schema.PROJECTIONS[table]
            where = [c == k for c, k in zip(target.primary_key, key, strict=True)]
            found = self._connection.execute(sa.select(target).where(*where)).mappings().first()
            self._rows[place] = None if found is None else decode(table, found)
        row = self._rows[place]
        return row if isinstance(row, table) else None

    def put(self, row: Row) -> None:
        """Insert or replace the row, at the next flush."""
        place = (type(row), row.key)
        self._rows[place] = row
        self._dirty[place] = row

    def find(self, key: str) -> Event | None:
        """The event with this idempotency key."""
        query = sa.select(schema.events).where(schema.events.c.key == key)
        found = self._connection.execute(query).mappings().first()
        return None if found is None else decode_event(found)

    def append(self, new: NewEvent) -> Event:
        """Append and fold. Appending the same fact under the same key again changes nothing.

        Raises:
            Conflict: the key exists with another fact.
        """
        earlier = self.find(new.key)
        if earlier is not None:
            if not earlier.says_the_same(new):
                raise Conflict(
                    f"key {new.key!r} was used by event {earlier.seq} ({earlier.kind}) with "
                    "other content"
                )
            return earlier
        event = seal(new, seq=self._seq + 1, recorded_at=self._recorded_at, prev_hash=self._hash)
        columns = {name: getattr(event, name) for name in Event.__slots__}
        self._connection.execute(sa.insert(schema.events), columns)
        self._seq, self._hash = event.seq, event.hash
        self.appended.append(event)
        fold.apply(self, event)
        return event

    def add_phases(
        self, event: Event, source: str, phases: Mapping[str, float], *, run: str | None = None
    ) -> None:
        """Record how long each phase of the event's version took, in seconds."""
        if phases and event in self.appended:
            common = {
                "seq": event.seq,
                "line": event.line,
                "run": event.run if run is None else run,
                "version": event.version,
                "source": source,
            }
            rows = [{**common, "phase": p, "duration_s": s} for p, s in phases.items()]
            self._connection.execute(sa.insert(schema.phases), rows)

    def heartbeat(self, line: str, replica: str) -> tuple[int, int] | None:
        """(generation, counter), or None."""
        table = schema.heartbeats
        query = sa.select(table.c.generation, table.c.counter).where(
            table.c.line == line, table.c.replica == replica
        )
        query = query.with_for_update()  # a beat takes no lock but this row's
        found = self._connection.execute(query).first()
        return None if found is None else (found.generation, found.counter)

    def set_heartbeat(self, line: str, replica: str, generation: int, counter: int) -> None:
        """Replace the counter."""
        upsert(
            self._connection,
            schema.heartbeats,
            {"line": line, "replica": replica, "generation": generation, "counter": counter},
        )

    def live_replicas(self, line: str) -> list[ReplicaRow]:
        """Replicas that are joined, by name."""
        self.flush()
        table = schema.replicas
        query = (
            sa.select(table)
            .where(table.c.line == line, table.c.state == "joined")
            .order_by(table.c.replica)
        )
        return [decode(ReplicaRow, m) for m in self._connection.execute(query).mappings()]

    def residency(self, line: str, version: int) -> dict[str, ResidencyRow]:
        """Replica -> what it last said about the version."""
        self.flush()
        table = schema.residency
        query = sa.select(table).where(table.c.line == line, table.c.version == version)
        rows = [decode(ResidencyRow, m) for m in self._connection.execute(query).mappings()]
        return {row.replica: row for row in rows}

    def waiting_versions(self, run: str) -> list[int]:
        """Published versions of the run that were never current or skipped, oldest first."""
        self.flush()
        table = schema.versions
        query = (
            sa.select(table.c.version)
            .where(
                table.c.run == run,
                table.c.published_seq.is_not(None),
                table.c.state == "published",
                table.c.became_current_seq.is_(None),
            )
            .order_by(table.c.published_seq)
        )
        return list(self._connection.execute(query).scalars())

    def versions_after(self, line: str, version: int) -> list[int]:
        """Published or skipped versions of the line with a greater number."""
        self.flush()
        table = schema.versions
        query = (
            sa.select(table.c.version)
            .where(
                table.c.line == line,
                table.c.version > version,
                table.c.state.in_(["published", "skipped"]),
            )
            .order_by(table.c.version)
        )
        return list(self._connection.execute(query).scalars())

    def flush(self) -> None:
        """Write the changed rows and the head."""
        for row in self._dirty.values():
            upsert(self._connection, schema.PROJECTIONS[type(row)], asdict(row))
        self._dirty.clear()
        if self.appended:
            last = self.appended[-1]
            self._connection.execute(
                sa.update(schema.head).values(
                    seq=last.seq, hash=last.hash, recorded_at=last.recorded_at
                )
            )
