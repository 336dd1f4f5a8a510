"""The ledger's reading side: typed answers, each from one consistent snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from policyline.ledger.append.unit_of_work import R
from policyline.ledger.checkpoint import text_hash
from policyline.ledger.db import schema
from policyline.ledger.db.db_errors import translating
from policyline.ledger.db.migrate import missing_tables
from policyline.ledger.db.sqlite_file import OpenedFile
from policyline.ledger.db.statements import EVENT_COLUMNS, bind
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.errors import VERIFY_HINT, Corrupted, NotFound
from policyline.ledger.events import VERSION_ACKED, VERSION_PUBLISHED, Event
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import policy_name
from policyline.ledger.read.line_queries import (
    read_replicas,
    read_run,
    read_versions,
    read_view,
)
from policyline.ledger.rollouts import HASHED_FIELDS, MixedEpisode, RolloutFilter, RolloutRow
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, RunRow, VersionRow

RolloutTuple = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """How long one phase of one version took at one place."""

    line: str
    run: str
    version: int
    source: str
    """`publisher`, or the replica's name."""
    phase: str
    duration_s: float


PAGE_ROWS: Final = 500


class Snapshot:
    """The projections in one read transaction."""

    def __init__(self, connection: Connection, head: tuple[int, str]) -> None:
        self._connection = connection
        self.head = head
        """(seq, hash) of the last event."""

    def head_time(self) -> str:
        """When the last event was recorded, as the head says; UTC, ISO 8601."""
        found: str = self._connection.execute(sa.select(schema.head.c.recorded_at)).scalar_one()
        return found

    def has_events_after(self, seq: int) -> bool:
        """Whether the chain goes on."""
        query = sa.select(sa.func.max(schema.events.c.seq))
        last = self._connection.execute(query).scalar()
        return last is not None and last > seq

    def last_rollout(self) -> int:
        """The id of the last rollout; 0 without one."""
        return _last_rollout(self._connection)

    def stray_phases(self, most: int) -> list[tuple[int, int, str]]:
        """(id, seq, policy name) of phases, at most so many, that no event can have brought.

        They are outside the fold: known is only that each came with an event about its version.
        """
        phase, event, version = schema.phases.c, schema.events.c, schema.versions.c
        same_event = (
            (event.seq == phase.seq)
            & (event.line == phase.line)
            & (event.version == phase.version)
            & event.kind.in_((VERSION_PUBLISHED, VERSION_ACKED))
        )
        same_version = (
            (version.line == phase.line)
            & (version.version == phase.version)
            & (version.run == phase.run)
        )
        query = (
            sa.select(phase.id, phase.seq, phase.line, phase.version)
            .select_from(
                schema.phases.outerjoin(schema.events, same_event).outerjoin(
                    schema.versions, same_version
                )
            )
            .where(event.seq.is_(None) | version.version.is_(None))
            .order_by(phase.id)
            .limit(most)
        )
        rows = self._connection.execute(query)
        return [(row.id, row.seq, policy_name(row.line, row.version)) for row in rows]

    def pages(self, table: type[R]) -> Iterator[list[R]]:
        """Every row of a projection, streamed by the page."""
        query = sa.select(schema.PROJECTIONS[table])
        result = self._connection.execution_options(yield_per=PAGE_ROWS).execute(query)
        for page in result.partitions():
            yield [table(*row) for row in page]


class Reads:
    """Queries. Each method is one read transaction and returns frozen dataclasses."""

    def __init__(self, engine: Engine, shown_url: str) -> None:
        self._engine = engine
        self._file: OpenedFile | None = None
        self._snapshots = _of_snapshots(engine)
        self.shown_url = shown_url
        """The URL without its password."""

    def view(
        self, line: str, also: Collection[int] = (), *, replica: str | None = None
    ) -> LineSnapshot:
        """The line now.

        Args:
            line: to read.
            also: versions to tell about beyond the desired ones.
            replica: tell what this one said, and about the candidate what all did; None for all.
        """
        with self._reading() as connection:
            found = read_view(connection, line, also, replica)
        if found is None:
            raise Corrupted(f"ledger {self.shown_url} has lost its head row")
        return found

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """All projections at one event, for comparison; streamed."""
        with self._reading() as connection:
            yield Snapshot(connection, self._head(connection)[1:])

    def head(self) -> tuple[int, str]:
        """(seq, hash) of the last event; (0, zeros) for an empty ledger."""
        with self._reading() as connection:
            return self._head(connection)[1:]

    def extent(self) -> tuple[int, str, int]:
        """(seq, hash) of the last event and the id of the last rollout, at one moment."""
        with self._reading() as connection:
            _, seq, last_hash = self._head(connection)
            return seq, last_hash, _last_rollout(connection)

    def missing_tables(self) -> list[str]:
        """Tables that the database has lost."""
        with self._reading() as connection:
            return missing_tables(connection)

    def recorded(self, *, until: int, last: int) -> tuple[int, int]:
        """How many phases up to event `until` and rollouts up to the id `last` there are."""
        phases, rollouts = schema.phases.c, schema.rollouts.c
        count = sa.select(sa.func.count())
        with self._reading() as connection:
            return (
                connection.execute(count.where(phases.seq <= until)).scalar_one(),
                connection.execute(count.where(rollouts.id <= last)).scalar_one(),
            )

    def runs(self, line: str | None = None) -> list[RunRow]:
        """Runs, oldest first."""
        table = schema.runs
        query = sa.select(table).order_by(table.c.opened_seq)
        if line is not None:
            query = query.where(table.c.line == line)
        with self._reading() as connection:
            return [RunRow(*row) for row in connection.execute(query)]

    def run(self, run: str) -> RunRow:
        """One run.

        Raises:
            NotFound: with the runs there are.
        """
        with self._reading() as connection:
            row = read_run(connection, run)
        if row is None:
            known = ", ".join(r.run for r in self.runs()[-5:]) or "none"
            raise NotFound(
                f"run {run!r} is not in this ledger (newest: {known})",
                hint="run: policyline ledger runs",
            )
        return row

    def versions(self, *, run: str | None = None, line: str | None = None) -> list[VersionRow]:
        """Versions of a run or a line by number."""
        table = schema.versions
        query = sa.select(table).order_by(table.c.line, table.c.version)
        if run is not None:
            query = query.where(table.c.run == run)
        if line is not None:
            query = query.where(table.c.line == line)
        with self._reading() as connection:
            return [VersionRow(*row) for row in connection.execute(query)]

    def version(self, line: str, version: int) -> VersionRow:
        """One version.

        Raises:
            NotFound: never reserved on this line.
        """
        with self._reading() as connection:
            found = read_versions(connection, line, {version})
        if version not in found:
            raise NotFound(
                f"{policy_name(line, version)} is not in this ledger",
                hint="run: policyline ledger versions",
            )
        return found[version]

    def lines(self) -> list[LineRow]:
        """Every line."""
        query = sa.select(schema.lines).order_by(schema.lines.c.line)
        with self._reading() as connection:
            return [LineRow(*row) for row in connection.execute(query)]

    def replicas(self, line: str) -> list[ReplicaRow]:
        """Replicas of a line by name, those that left included."""
        with self._reading() as connection:
            return read_replicas(connection, line)

    def residency(self, line: str) -> list[ResidencyRow]:
        """What every replica last said about every version."""
        table = schema.residency
        query = (
            sa.select(table).where(table.c.line == line).order_by(table.c.version, table.c.replica)
        )
        with self._reading() as connection:
            return [ResidencyRow(*row) for row in connection.execute(query)]

    def heartbeats(self, line: str) -> dict[str, tuple[int, int]]:
        """Replica -> (generation, counter)."""
        with self._reading() as connection:
            rows = _driver_rows(connection, _HEARTBEATS, {"line": line})
        return {replica: (generation, counter) for replica, generation, counter in rows}

    def phases(
        self, *, run: str | None = None, line: str | None = None, version: int | None = None
    ) -> list[PhaseRow]:
        """Phase durations, in the order recorded."""
        table = schema.phases
        query = sa.select(table).order_by(table.c.id)
        for column, value in ((table.c.run, run), (table.c.line, line), (table.c.version, version)):
            if value is not None:
                query = query.where(column == value)
        with self._reading() as connection:
            rows = connection.execute(query).mappings().all()
        for row in rows:
            if not isinstance(row["duration_s"], float | int):
                shown = f"{row['duration_s']!r:.40}"
                raise Corrupted(
                    f"row {row['id']} of phases lasted {shown}, which is no number",
                    seq=row["seq"],
                    hint=VERIFY_HINT,
                )
        return [
            PhaseRow(m["line"], m["run"], m["version"], m["source"], m["phase"], m["duration_s"])
            for m in rows
        ]

    def phase_rows(self, *, until: int, batch: int = 2000) -> Iterator[dict[str, Any]]:
        """Phases recorded with events up to seq `until`, as columns, streamed."""
        table = schema.phases
        columns = [c for c in table.columns if c.name != "id"]
        after = 0
        while True:
            page = (
                sa.select(table.c.id, *columns)
                .where(table.c.id > after, table.c.seq <= until)
                .order_by(table.c.id)
                .limit(batch)
            )
            with self._reading() as connection:
                rows = [dict(m) for m in connection.execute(page).mappings()]
            for row in rows:
                after = row.pop("id")
                yield row
            if len(rows) < batch:
                return

    def all_events(
        self, *, after: int = 0, connection: Connection | None = None, batch: int = 2000
    ) -> Iterator[Event]:
        """Every event after `after`, streamed, as fast as can be: for whoever folds them all.

        Args:
            after: only events with a greater seq.
            connection: of the caller's transaction, to read in that.
            batch: how many rows a query takes.
        """
        while True:
            values = {"after": after, "most": batch}
            with nullcontext(connection) if connection is not None else self._reading() as there:
                rows = _driver_rows(there, _EVENTS_AFTER, values)
            for row in rows:
                yield Event(*row)
            if len(rows) < batch:
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
        batch: int = 2000,
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
            batch: how many rows a query takes.
        """
        table = schema.events
        query = sa.select(table).order_by(table.c.seq)
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
        given = 0
        while limit is None or given < limit:
            size = batch if limit is None else min(batch, limit - given)
            with self._reading() as connection:
                page = query.where(table.c.seq > after).limit(size)
                rows = [Event(*row) for row in connection.execute(page)]
            yield from rows
            given += len(rows)
            if len(rows) < size:
                return
            after = rows[-1].seq

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

    def rollouts(
        self, wanted: RolloutFilter, *, last: int | None = None, batch: int = 2000
    ) -> Iterator[RolloutRow]:
        """Rollouts in the order recorded, up to the id `last`, streamed in batches."""
        table = schema.rollouts
        query = sa.select(table).order_by(table.c.id)
        if last is not None:
            query = query.where(table.c.id <= last)
        for condition in _conditions(wanted):
            query = query.where(condition)
        after, given = 0, 0
        while wanted.limit is None or given < wanted.limit:
            size = batch if wanted.limit is None else min(batch, wanted.limit - given)
            with self._reading() as connection:
                page = query.where(table.c.id > after).limit(size)
                rows = [RolloutRow(**m) for m in connection.execute(page).mappings()]
            yield from rows
            given += len(rows)
            if len(rows) < size:
                return
            after = rows[-1].id

    def rollout_tuples(self, *, after: int, batch: int = 5000) -> Iterator[RolloutTuple]:
        """(id, line, batch, staleness, *HASHED_FIELDS) in order after the id `after`, streamed."""
        while True:
            with self._reading() as connection:
                rows = _driver_rows(connection, _ROLLOUTS_AFTER, {"after": after, "most": batch})
            yield from rows
            if len(rows) < batch:
                return
            after = rows[-1][0]

    def rollout_counts(self, line: str, version: int) -> dict[str, int]:
        """Replica -> how many rollouts of the version it answered."""
        table = schema.rollouts
        query = (
            sa.select(table.c.replica, sa.func.count())
            .where(table.c.line == line, table.c.version == version)
            .group_by(table.c.replica)
            .order_by(table.c.replica)
        )
        with self._reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def mixed_episodes(self, line: str, *, run: str | None = None) -> list[MixedEpisode]:
        """Episodes that were answered from more than one version, in the order they began."""
        c = schema.rollouts.c
        of_line = [c.line == line, c.episode != "", *([c.run == run] if run is not None else ())]
        mixed = (
            sa.select(c.episode)
            .where(*of_line)
            .group_by(c.episode)
            .having(sa.func.min(c.version) != sa.func.max(c.version))
        )
        query = (
            sa.select(c.episode, c.run, c.version, c.replica, c.started_at)
            .where(*of_line, c.episode.in_(mixed))
            .order_by(c.id)
        )
        found: dict[str, list[Any]] = {}
        with self._reading() as connection:
            for row in connection.execute(query):
                found.setdefault(row.episode, []).append(row)
        return [
            MixedEpisode(
                episode=episode,
                run=rows[0].run,
                requests=dict(Counter(row.version for row in rows)),
                replicas=tuple(sorted({row.replica for row in rows})),
                first_at=min(row.started_at for row in rows),
                last_at=max(row.started_at for row in rows),
            )
            for episode, rows in found.items()
        ]

    def find_version(self, digest: str) -> list[VersionRow]:
        """Versions whose digest starts with `digest` (hex), oldest first."""
        table = schema.versions
        query = (
            sa.select(table)
            .where(table.c.digest >= digest, table.c.digest < digest + "g")
            .order_by(table.c.published_seq)
        )
        with self._reading() as connection:
            return [VersionRow(*row) for row in connection.execute(query)]

    def _head(self, connection: Connection) -> tuple[str, int, str]:
        found = connection.execute(sa.select(schema.head)).mappings().first()
        if found is None:
            raise Corrupted(f"ledger {self.shown_url} has lost its head row")
        return found["ledger_id"], found["seq"], found["hash"]

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._translating(), self._snapshots.connect() as connection, connection.begin():
            yield connection

    def _translating(self) -> AbstractContextManager[None]:
        if self._file is not None:
            self._file.check()
        return translating(self._engine, self.shown_url)


_EVENTS_AFTER = Prepared(
    sa.select(*EVENT_COLUMNS)
    .where(schema.events.c.seq > bind("after"))
    .order_by(schema.events.c.seq)
    .limit(bind("most"))
)
_BEAT = schema.heartbeats.c
_HEARTBEATS = Prepared(
    sa.select(_BEAT.replica, _BEAT.generation, _BEAT.counter).where(_BEAT.line == bind("line"))
)
_ROLLOUT = schema.rollouts.c
_ROLLOUTS_AFTER = Prepared(
    sa.select(
        _ROLLOUT.id,
        _ROLLOUT.line,
        _ROLLOUT.batch,
        _ROLLOUT.staleness,
        *(_ROLLOUT[name] for name in HASHED_FIELDS),
    )
    .where(_ROLLOUT.id > bind("after"))
    .order_by(_ROLLOUT.id)
    .limit(bind("most"))
)


def _driver_rows(
    connection: Connection, statement: Prepared, values: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """Rows as the driver gives them: a million of them pass through no more hands than needed."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(*statement.render(connection.dialect, values))
        return list(cursor.fetchall())
    finally:
        cursor.close()


def _of_snapshots(engine: Engine) -> Engine:
    """The engine, with every transaction one snapshot.

    At READ COMMITTED, Postgres takes a new one for each statement, and an answer that needs several
    would mix the states at two events.
    """
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="REPEATABLE READ")


def _conditions(wanted: RolloutFilter) -> list[sa.ColumnElement[bool]]:
    c = schema.rollouts.c
    equal = {
        c.line: wanted.line,
        c.run: wanted.run,
        c.version: wanted.version,
        c.replica: wanted.replica,
        c.request: wanted.request,
        c.episode: wanted.episode,
    }
    conditions = [column == value for column, value in equal.items() if value is not None]
    if wanted.since is not None:
        conditions.append(c.started_at >= wanted.since)
    if wanted.until is not None:
        conditions.append(c.started_at < wanted.until)
    if wanted.min_staleness is not None:
        conditions.append(c.staleness >= wanted.min_staleness)
    return conditions


def _last_rollout(connection: Connection) -> int:
    return connection.execute(sa.select(sa.func.max(schema.rollouts.c.id))).scalar() or 0


def replica_row(connection: Connection, line: str, replica: str) -> ReplicaRow | None:
    """One replica in the caller's transaction."""
    table = schema.replicas
    query = sa.select(table).where(table.c.line == line, table.c.replica == replica)
    found = connection.execute(query).first()
    return None if found is None else ReplicaRow(*found)
