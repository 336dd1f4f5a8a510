"""Questions about what is: lines, runs, versions, replicas. Each answer is one snapshot."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from policyline.ledger.db import schema
from policyline.ledger.db.database import Database
from policyline.ledger.db.migrate import missing_tables
from policyline.ledger.db.statements import bind, driver_rows
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.errors import Corrupted, NotFound
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import policy_name
from policyline.ledger.read.line_queries import (
    read_replicas,
    read_snapshot,
    read_versions,
)
from policyline.ledger.read.window import read_run
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, RunRow, VersionRow

_BEAT = schema.heartbeats.c
_HEARTBEATS = Prepared(
    sa.select(_BEAT.replica, _BEAT.generation, _BEAT.counter).where(_BEAT.line == bind("line"))
)


class StateQueries(Database):
    """Questions about the projections as they are now."""

    def view(
        self, line: str, also: Collection[int] = (), *, replica: str | None = None
    ) -> LineSnapshot:
        """The line now.

        Args:
            line: to read.
            also: versions to include beyond the desired ones.
            replica: include only what this one reported, and what all did about the candidate;
                None for all.
        """
        with self._reading() as connection:
            found = read_snapshot(connection, line, also, replica)
        if found is None:
            raise Corrupted(f"ledger {self.shown_url} has lost its head row")
        return found

    def missing_tables(self) -> list[str]:
        """Tables that the database has lost."""
        with self._reading() as connection:
            return missing_tables(connection)

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
        """What every replica last reported about every version."""
        table = schema.residency
        query = (
            sa.select(table).where(table.c.line == line).order_by(table.c.version, table.c.replica)
        )
        with self._reading() as connection:
            return [ResidencyRow(*row) for row in connection.execute(query)]

    def heartbeats(self, line: str) -> dict[str, tuple[int, int]]:
        """Replica -> (generation, counter)."""
        with self._reading() as connection:
            rows = driver_rows(connection, _HEARTBEATS, {"line": line})
        return {replica: (generation, counter) for replica, generation, counter in rows}
