"""Questions about what is outside the fold: rollouts and phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.db import schema
from policyline.ledger.db.database import PAGE_ROWS, Database
from policyline.ledger.db.statements import bind, driver_rows
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.errors import VERIFY_HINT, Corrupted
from policyline.ledger.rollouts import HASHED_FIELDS, MixedEpisode, RolloutFilter, RolloutRow

RolloutTuple = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """How long one phase of one version took, and where."""

    line: str
    run: str
    version: int
    source: str
    """`publisher`, or the replica's name."""
    phase: str
    duration_s: float


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


class RolloutQueries(Database):
    """Questions about rollouts and phases."""

    def extent(self) -> tuple[int, str, int]:
        """(seq, hash) of the last event and the id of the last rollout, at one moment."""
        with self._reading() as connection:
            _, seq, last_hash = self._head(connection)
            return seq, last_hash, last_rollout_id(connection)

    def recorded(self, *, until: int, last: int) -> tuple[int, int]:
        """How many phases up to event `until` and rollouts up to the id `last` there are."""
        phases, rollouts = schema.phases.c, schema.rollouts.c
        count = sa.select(sa.func.count())
        with self._reading() as connection:
            return (
                connection.execute(count.where(phases.seq <= until)).scalar_one(),
                connection.execute(count.where(rollouts.id <= last)).scalar_one(),
            )

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

    def phase_rows(self, *, until: int) -> Iterator[dict[str, Any]]:
        """Phases recorded with events up to seq `until`, as columns, streamed."""
        table = schema.phases
        for row in self._streamed(sa.select(table).where(table.c.seq <= until), table.c.id):
            columns = dict(row)
            del columns["id"]
            yield columns

    def rollouts(self, wanted: RolloutFilter, *, last: int | None = None) -> Iterator[RolloutRow]:
        """Rollouts in the order recorded, up to the id `last`, streamed in batches."""
        table = schema.rollouts
        query = sa.select(table)
        if last is not None:
            query = query.where(table.c.id <= last)
        for condition in _conditions(wanted):
            query = query.where(condition)
        for row in self._streamed(query, table.c.id, limit=wanted.limit):
            yield RolloutRow(**row)

    def rollout_tuples(self, *, after: int) -> Iterator[RolloutTuple]:
        """(id, line, batch, staleness, *HASHED_FIELDS) in order after the id `after`, streamed."""
        while True:
            with self._reading() as connection:
                rows = driver_rows(connection, _ROLLOUTS_AFTER, {"after": after, "most": PAGE_ROWS})
            yield from rows
            if len(rows) < PAGE_ROWS:
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


def last_rollout_id(connection: Connection) -> int:
    """The id of the last rollout; 0 without one."""
    return connection.execute(sa.select(sa.func.max(schema.rollouts.c.id))).scalar() or 0
