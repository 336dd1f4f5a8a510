"""Questions about what happened: events, and the checkpoints made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.checkpoint import text_hash
from policyline.ledger.db import schema
from policyline.ledger.db.database import PAGE_ROWS
from policyline.ledger.db.statements import EVENT_COLUMNS, bind, driver_rows
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.events import Event
from policyline.ledger.read.state_queries import StateQueries

_EVENTS_AFTER = Prepared(
    sa.select(*EVENT_COLUMNS)
    .where(schema.events.c.seq > bind("after"))
    .order_by(schema.events.c.seq)
    .limit(bind("most"))
)


class EventQueries(StateQueries):
    """Questions about the events."""

    def head(self) -> tuple[int, str]:
        """(seq, hash) of the last event; (0, zeros) for an empty ledger."""
        with self._reading() as connection:
            return self._head(connection)[1:]

    def all_events(
        self, *, after: int = 0, connection: Connection | None = None
    ) -> Iterator[Event]:
        """Every event after `after`, streamed as fast as possible: to fold them all.

        Args:
            after: only events with a greater seq.
            connection: of the caller's transaction, to read in that.
        """
        while True:
            values = {"after": after, "most": PAGE_ROWS}
            with nullcontext(connection) if connection is not None else self._reading() as there:
                rows = driver_rows(there, _EVENTS_AFTER, values)
            for row in rows:
                yield Event(*row)
            if len(rows) < PAGE_ROWS:
                return
            after = rows[-1][0]

    def events(
        self,
        *,
        after: int = 0,
        run: str | None = None,
        line: str | None = None,
        version: int | None = None,
        kinds: Collection[str] = (),
        last: int | None = None,
        limit: int | None = None,
    ) -> Iterator[Event]:
        """Events in order, streamed in batches; memory does not grow with the ledger.

        Args:
            after: only events with a greater seq.
            run: only of this run (events of replicas count to the line's run of their time).
            line: only of this line.
            version: only about this version.
            kinds: only of these kinds; empty means all.
            last: only up to this seq.
            limit: at most so many.
        """
        table = schema.events
        query = sa.select(table)
        if run is not None:
            # a run has no event before its opening, so no index of runs is needed
            after = max(after, self.run(run).opened_seq - 1)
        # an expression, so that a line's events are found by seq: SQLite would else take the index
        # of versions, read the whole line and sort it
        of_line = table.c.line if version is not None else table.c.line.concat("")
        wanted = ((table.c.run, run), (of_line, line), (table.c.version, version))
        for column, value in wanted:
            if value is not None:
                query = query.where(column == value)
        if last is not None:
            query = query.where(table.c.seq <= last)
        if kinds:
            query = query.where(table.c.kind.in_(sorted(kinds)))
        for row in self._streamed(query, table.c.seq, after=after, limit=limit):
            yield Event(**row)

    def next_replica_events(self, line: str, replica: str, after: int, limit: int) -> list[Event]:
        """Joins, losses, incarnations and the like of one replica after an event."""
        table = schema.events
        query = (
            sa.select(table)
            .where(
                table.c.line == line,
                table.c.replica == replica,
                table.c.version.is_(None),
                table.c.seq > after,
            )
            .order_by(table.c.seq)
            .limit(limit)
        )
        with self._reading() as connection:
            return [Event(*row) for row in connection.execute(query)]

    def checkpoint_before(self, line: str, seq: int) -> tuple[int, str]:
        """(seq, state) of the line's newest checkpoint not after `seq`; (0, "") without one."""
        table = schema.checkpoints
        query = (
            sa.select(table.c.seq, table.c.state)
            .where(table.c.line == line, table.c.seq <= seq)
            .order_by(table.c.seq.desc())
            .limit(1)
        )
        with self._reading() as connection:
            found = connection.execute(query).first()
        return (0, "") if found is None else (found.seq, found.state)

    def checkpoint_hashes(self) -> dict[int, dict[str, str]]:
        """Seq -> line -> sha256 hex of the checkpoint's text."""
        table = schema.checkpoints
        found: dict[int, dict[str, str]] = {}
        query = sa.select(table.c.seq, table.c.line, table.c.state).order_by(table.c.seq)
        with self._reading() as connection:
            for row in connection.execution_options(yield_per=100).execute(query):
                found.setdefault(row.seq, {})[row.line] = text_hash(row.state)
        return found

    def last_seq_until(self, recorded_at: str) -> int | None:
        """The last event recorded at or before a time (text as events record it).

        A binary search by seq: times never go back, so they need no index of their own, which
        every append would pay for.
        """
        table = schema.events
        with self._reading() as connection:
            low, high = 0, self._head(connection)[1]
            while low < high:
                middle = (low + high + 1) // 2
                query = sa.select(table.c.recorded_at).where(table.c.seq == middle)
                found = connection.execute(query).scalar()
                if found is not None and found <= recorded_at:
                    low = middle
                else:
                    high = middle - 1
        return low or None
