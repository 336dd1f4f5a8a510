"""Write transactions at the driver's own level.

An append is a handful of tiny statements around one commit, so what a toolkit adds per statement
is most of its cost: measured, SQLAlchemy's execution made an append 7 to 12 times slower than a
bare INSERT and COMMIT. Statements are therefore written in SQLAlchemy Core, compiled once per
dialect (`Prepared`) and run on the driver's cursor; pool, dialect and URL stay SQLAlchemy's. On
Postgres, taking the lock and reading the head is one round trip, and so are all writes with COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect, Engine

from ledger import schema
from ledger.errors import Corrupted
from ledger.signals import NotifySignal

LOCK_KEY = 7_074_936_512_246_801
"""Postgres advisory lock of the append: one writer at a time, so that seq order is commit order
and a reader that tails the events cannot pass a gap that is filled later."""

Head = tuple[str, int, str, str]
"""(ledger_id, seq, hash, recorded_at) of the last event."""
SqlRow = tuple[Any, ...]

_WORTH_A_PIPELINE = 3
"""Opening psycopg's pipeline costs about as much as three queries over a local socket."""

_READ_HEAD = "SELECT ledger_id, seq, hash, recorded_at FROM head"


class Prepared:
    """A Core statement that is compiled once per dialect; its parameters are named."""

    def __init__(self, statement: sa.sql.expression.ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, list[str] | None, dict[str, Any]]] = {}

    def render(self, dialect: Dialect, values: Mapping[str, Any]) -> tuple[str, Any]:
        """SQL text and parameters as the dialect's driver takes them."""
        found = self._compiled.get(dialect.name)
        if found is None:
            compiled = self._statement.compile(dialect=dialect)
            order = getattr(compiled, "positiontup", None)
            literals = {n: v for n, v in (compiled.params or {}).items() if v is not None}
            found = self._compiled[dialect.name] = (str(compiled), order, literals)
        text, order, literals = found
        given = {**literals, **values} if literals else values
        return text, given if order is None else [given[name] for name in order]


Statement = tuple[Prepared, Mapping[str, Any]]


def take_lock(connection: Connection) -> None:
    """Take the ledger's lock in a plain transaction; SQLite's began with it."""
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(schema.BUSY_TIMEOUT_S * 1000)}")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_KEY})")


class Transaction(Protocol):
    """One serialised write transaction, begun."""

    head: Head

    def query(self, statements: Sequence[Statement]) -> list[list[SqlRow]]:
        """The rows of each query, in as few round trips as the driver can."""

    def commit(self, writes: Sequence[Statement], *, notify: bool) -> None:
        """Write, raise the signal where the database does that, and commit."""

    def roll_back(self) -> None:
        """Undo; a no-op after `commit`."""


@contextmanager
def begin(engine: Engine) -> Iterator[Transaction]:
    """Take the ledger's lock; without a `commit` everything is rolled back.

    A pooled connection that the server has closed meanwhile is replaced, once: what was sent on
    it so far cannot have had an effect.
    """
    kind = _SqliteTransaction if engine.dialect.name == "sqlite" else _PostgresTransaction
    pooled = engine.raw_connection()
    try:
        try:
            transaction = kind(pooled.driver_connection, engine.dialect)
        except engine.dialect.loaded_dbapi.Error as error:
            if not engine.dialect.is_disconnect(error, pooled.driver_connection, None):
                raise
            pooled.invalidate(error)
            pooled.close()
            pooled = engine.raw_connection()
            transaction = kind(pooled.driver_connection, engine.dialect)
        try:
            yield transaction
        finally:
            transaction.roll_back()
    except engine.dialect.loaded_dbapi.Error as error:
        if engine.dialect.is_disconnect(error, pooled.driver_connection, None):
            pooled.invalidate(error)
        raise
    finally:
        pooled.close()


class _SqliteTransaction:
    """`connect` has set the driver to explicit transactions."""

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect
        self._cursor = connection.cursor()
        self._cursor.execute("BEGIN IMMEDIATE")
        try:
            self.head = _head_of(self._cursor.execute(_READ_HEAD).fetchone())
        except BaseException:
            self.roll_back()
            raise

    def query(self, statements: Sequence[Statement]) -> list[list[SqlRow]]:
        return [
            self._cursor.execute(*prepared.render(self._dialect, values)).fetchall()
            for prepared, values in statements
        ]

    def commit(self, writes: Sequence[Statement], *, notify: bool) -> None:  # noqa: ARG002 - SQLite has none
        for prepared, values in writes:
            self._cursor.execute(*prepared.render(self._dialect, values))
        self._cursor.execute("COMMIT")

    def roll_back(self) -> None:
        if self._connection.in_transaction:
            self._cursor.execute("ROLLBACK")
        self._cursor.close()


class _PostgresTransaction:
    """Explicit BEGIN and COMMIT on a connection in autocommit mode, to save their round trips."""

    _BEGIN = (
        "BEGIN ISOLATION LEVEL READ COMMITTED; "
        f"SELECT pg_advisory_xact_lock({LOCK_KEY}); {_READ_HEAD}"
    )
    # at this level, whatever the database's default, each statement of one simple query has a
    # snapshot of its own, so the head is read as the former holder of the lock left it

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect
        connection.prepare_threshold = 0  # every statement comes again
        self._cursor = connection.cursor()
        try:
            self._cursor.execute(self._BEGIN, prepare=False)
            while self._cursor.nextset():
                pass
            self.head = _head_of(self._cursor.fetchone())
        except BaseException:
            self.roll_back()
            raise

    def query(self, statements: Sequence[Statement]) -> list[list[SqlRow]]:
        rendered = [prepared.render(self._dialect, values) for prepared, values in statements]
        if len(rendered) < _WORTH_A_PIPELINE:
            return [self._cursor.execute(*one).fetchall() for one in rendered]
        with self._connection.pipeline():
            cursors = [self._connection.execute(text, values) for text, values in rendered]
        return [cursor.fetchall() for cursor in cursors]

    def commit(self, writes: Sequence[Statement], *, notify: bool) -> None:
        with self._connection.pipeline():
            for prepared, values in writes:
                self._cursor.execute(*prepared.render(self._dialect, values))
            if notify:
                self._cursor.execute(f"NOTIFY {NotifySignal.CHANNEL}")
            self._cursor.execute("COMMIT")

    def roll_back(self) -> None:
        if self._connection.closed:
            return
        if self._connection.info.transaction_status != 0:
            self._connection.execute("ROLLBACK")


def _head_of(row: Any) -> Head:
    if row is None:
        raise Corrupted("the ledger has lost its head row", hint="restore it from a backup")
    return row[0], row[1], row[2], row[3]
