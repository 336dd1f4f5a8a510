"""One serialised write transaction: takes the ledger's lock, reads the head, writes, commits.

It speaks to the driver itself: SQLAlchemy's connection adds a quarter of a millisecond to an
append, as much as SQLite needs for one. SQL text comes from Core, compiled once. On Postgres
taking the lock and reading the head is one round trip, and so are all writes with COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Dialect, Engine

from policyline.ledger.db.append_lock import TAKE_LOCK
from policyline.ledger.db.signals import CHANNELS, ChangeKind
from policyline.ledger.db.sqlite_writer import WriteConnection
from policyline.ledger.errors import Corrupted

Head = tuple[str, int, str, str]
"""(ledger_id, seq, hash, recorded_at) of the last event."""
SqlRow = tuple[Any, ...]

_READ_HEAD: Final = "SELECT ledger_id, seq, hash, recorded_at FROM head"


class Prepared:
    """A Core statement that is compiled once per dialect; its parameters are named."""

    def __init__(self, statement: sa.sql.expression.ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, _Compiled] = {}

    def render(self, dialect: Dialect, values: Mapping[str, Any]) -> tuple[str, Any]:
        """SQL text and parameters as the dialect's driver takes them."""
        text, order, literals = self._compile(dialect)
        given = {**literals, **values} if literals else values
        return text, given if order is None else tuple(given[name] for name in order)

    def _compile(self, dialect: Dialect) -> _Compiled:
        found = self._compiled.get(dialect.name)
        if found is None:
            compiled = self._statement.compile(dialect=dialect)
            order = getattr(compiled, "positiontup", None)
            literals = {n: v for n, v in (compiled.params or {}).items() if v is not None}
            found = self._compiled[dialect.name] = (str(compiled), order, literals)
        return found


_Compiled = tuple[str, list[str] | None, dict[str, Any]]
"""SQL text, the order of its parameters where they have no names, and its own literals."""
Statement = tuple[Prepared, Mapping[str, Any]]


class Transaction(Protocol):
    """One serialised write transaction, begun."""

    @property
    def head(self) -> Head:
        """The last event; what is appended follows it."""

    def query(self, statements: Sequence[Statement]) -> list[list[SqlRow]]:
        """The rows of each query, in as few round trips as the driver can."""

    def commit(self, writes: Sequence[Statement], *, change: ChangeKind | None) -> None:
        """Write, raise the signal where the database does that, and commit.

        Args:
            writes: in order.
            change: what the signal reports; None for no signal.
        """


@contextmanager
def begin(engine: Engine, write_connection: WriteConnection | None) -> Iterator[Transaction]:
    """Take the ledger's lock; without a `commit` everything is rolled back.

    Args:
        engine: from `connect.connect_shared`.
        write_connection: SQLite's connection for appends, from `connect.connect_to_write`.
    """
    if write_connection is None:
        with _begin_on_postgres(engine) as begun:
            yield begun
    else:
        with write_connection.transaction() as connection:
            yield _SqliteTransaction(connection, engine.dialect)


@contextmanager
def _begin_on_postgres(engine: Engine) -> Iterator[Transaction]:
    """A pooled connection that the server has closed meanwhile is replaced, once.

    What was sent on it so far cannot have had an effect.
    """
    pooled = engine.raw_connection()
    try:
        try:
            transaction = _PostgresTransaction(pooled.driver_connection, engine.dialect)
        except engine.dialect.loaded_dbapi.Error as error:
            if not engine.dialect.is_disconnect(error, pooled.driver_connection, None):
                raise
            pooled.invalidate(error)
            pooled.close()
            pooled = engine.raw_connection()
            transaction = _PostgresTransaction(pooled.driver_connection, engine.dialect)
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
    """Begun, and ended if need be, by `WriteConnection`."""

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._dialect = dialect
        self._cursor = connection.cursor()
        self.head = _head_of(self._cursor.execute(_READ_HEAD).fetchone())

    def query(self, statements: Sequence[Statement]) -> list[list[SqlRow]]:
        return [
            self._cursor.execute(*prepared.render(self._dialect, values)).fetchall()
            for prepared, values in statements
        ]

    def commit(self, writes: Sequence[Statement], *, change: ChangeKind | None) -> None:  # noqa: ARG002 - SQLite has no signal
        for prepared, values in writes:
            self._cursor.execute(*prepared.render(self._dialect, values))
        self._cursor.execute("COMMIT")


class _PostgresTransaction:
    """Explicit BEGIN and COMMIT on a connection in autocommit mode, to save their round trips."""

    _BEGIN = f"BEGIN ISOLATION LEVEL READ COMMITTED; {TAKE_LOCK}; {_READ_HEAD}"
    # at this level, whatever the database's default, each statement of one simple query has a
    # snapshot of its own, so the head is read as the former holder of the lock left it

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect
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
        if len(statements) == 1:
            ((prepared, values),) = statements
            return [self._execute(self._cursor, prepared, values).fetchall()]
        with self._connection.pipeline():
            sent = [
                self._execute(self._connection.cursor(), prepared, values)
                for prepared, values in statements
            ]
            return [cursor.fetchall() for cursor in sent]

    def commit(self, writes: Sequence[Statement], *, change: ChangeKind | None) -> None:
        failure: Exception | None = None
        try:
            with self._connection.pipeline():
                # raised in here, psycopg would also log the errors that follow from it
                try:
                    for prepared, values in writes:
                        self._execute(self._cursor, prepared, values)
                    if change is not None:
                        self._cursor.execute(f"NOTIFY {CHANNELS[change]}")
                    self._cursor.execute("COMMIT")
                except self._dialect.loaded_dbapi.Error as error:
                    failure = error
        except self._dialect.loaded_dbapi.Error as error:
            raise failure or error from None
        if failure is not None:
            raise failure

    def _execute(self, cursor: Any, prepared: Prepared, values: Mapping[str, Any]) -> Any:
        return cursor.execute(*prepared.render(self._dialect, values), prepare=True)

    def roll_back(self) -> None:
        """Undo; a no-op after `commit`."""
        if self._connection.closed:
            return
        if self._connection.info.transaction_status != 0:
            self._connection.execute("ROLLBACK")


def _head_of(row: Any) -> Head:
    if row is None:
        raise Corrupted("the ledger has lost its head row", hint="restore it from a backup")
    return row[0], row[1], row[2], row[3]
