"""Write transactions at the driver's own level.

An append is a handful of tiny statements around one commit, so what a toolkit adds per statement
is most of its cost: measured, SQLAlchemy's execution made an append 7 to 12 times slower than a
bare INSERT and COMMIT. Statements are therefore written in SQLAlchemy Core, compiled once per
dialect (`Prepared`) and run on the driver's cursor; pool, dialect and URL stay SQLAlchemy's. On
Postgres, taking the lock and reading the head is one round trip, and so are all writes with COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect, Engine

from policyline.ledger.db import schema
from policyline.ledger.db.signals import CHANNELS, News
from policyline.ledger.db.sqlite_writer import WriteConnection
from policyline.ledger.errors import Corrupted

LOCK_KEY = 7_074_936_512_246_801
"""Postgres advisory lock of the append: one writer at a time, so that seq order is commit order
and a reader that tails the events cannot pass a gap that is filled later."""

Head = tuple[str, int, str, str]
"""(ledger_id, seq, hash, recorded_at) of the last event."""
SqlRow = tuple[Any, ...]

_MOST_PARAMETERS = 400
"""Above it, as with a batch of rollouts, one statement a row in a pipeline is the cheaper way."""

_READ_HEAD = "SELECT ledger_id, seq, hash, recorded_at FROM head"


class Prepared:
    """A Core statement that is compiled once per dialect; its parameters are named.

    Args:
        statement: to run.
        if_moved: the same write as an INSERT ... SELECT from `moved`, a WITH query of one row, or
            of none when the head was moved by somebody else; None where there is no such form.
        columns: of a query that gives one row or none, and no NULL in the first of its columns,
            how many these are; 0 of any other.
    """

    def __init__(
        self,
        statement: sa.sql.expression.ClauseElement,
        *,
        if_moved: sa.sql.expression.ClauseElement | None = None,
        columns: int = 0,
    ) -> None:
        self._statement = statement
        self.if_moved = None if if_moved is None else Prepared(if_moved)
        self.columns = columns
        self._compiled: dict[str, _Compiled] = {}

    def compiled(self, dialect: Dialect) -> _Compiled:
        """SQL text, the order of its parameters where they have no names, and its own literals."""
        found = self._compiled.get(dialect.name)
        if found is None:
            compiled = self._statement.compile(dialect=dialect)
            order = getattr(compiled, "positiontup", None)
            literals = {n: v for n, v in (compiled.params or {}).items() if v is not None}
            found = self._compiled[dialect.name] = (str(compiled), order, literals)
        return found

    def render(self, dialect: Dialect, values: Mapping[str, Any]) -> tuple[str, Any]:
        """SQL text and parameters as the dialect's driver takes them."""
        text, order, literals = self.compiled(dialect)
        given = {**literals, **values} if literals else values
        return text, given if order is None else [given[name] for name in order]


_Compiled = tuple[str, list[str] | None, dict[str, Any]]
Statement = tuple[Prepared, Mapping[str, Any]]


def take_lock(connection: Connection) -> None:
    """Take the ledger's lock in a plain transaction; SQLite's began with it."""
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(schema.BUSY_TIMEOUT_S * 1000)}")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_KEY})")


def lock_head(connection: Connection) -> None:
    """After `take_lock`: keep out also those who write without it (`attempt`)."""
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(f"{_READ_HEAD} FOR UPDATE")


_HEAD = Prepared(sa.text(_READ_HEAD), columns=4)


class Transaction(Protocol):
    """One serialised write transaction, begun."""

    @property
    def head(self) -> Head:
        """The last event; what is appended follows it."""

    def query(self, statements: Sequence[Statement]) -> list[list[SqlRow]]:
        """The rows of each query, in as few round trips as the driver can."""

    def commit(self, writes: Sequence[Statement], *, news: News | None) -> bool:
        """Write, raise the signal where the database does that, and commit.

        The first write moves the head.

        Args:
            writes: in order.
            news: what the signal says; None for no signal.

        Returns:
            Whether it was done; False when nothing was, because somebody else moved the head.
        """


class _PostgresWork(Transaction, Protocol):
    def roll_back(self) -> None:
        """Undo; a no-op after `commit`."""


@contextmanager
def begin(engine: Engine, kept: WriteConnection | None) -> Iterator[Transaction]:
    """Take the ledger's lock; without a `commit` everything is rolled back.

    On Postgres a pooled connection that the server has closed meanwhile is replaced, once: what
    was sent on it so far cannot have had an effect.

    Args:
        engine: from `schema.connect_kept`.
        kept: SQLite's connection for appends, from `schema.connect_to_write`.
    """
    if kept is None:
        with _on_connection(engine, _PostgresTransaction) as begun:
            yield begun
    else:
        with kept.transaction() as connection:
            yield _SqliteTransaction(connection, engine.dialect)


@contextmanager
def attempt(engine: Engine, head: Head | None) -> Iterator[Transaction]:
    """A transaction without the lock, on Postgres: its `commit` may find that it came too late.

    Args:
        engine: from `schema.connect_kept`.
        head: to begin with; None reads it.
    """
    with _on_connection(engine, partial(_PostgresAttempt, head=head)) as begun:
        yield begun


@contextmanager
def _on_connection(
    engine: Engine, kind: Callable[[Any, Dialect], _PostgresWork]
) -> Iterator[Transaction]:
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

    def commit(self, writes: Sequence[Statement], *, news: News | None) -> bool:  # noqa: ARG002 - SQLite has none
        for prepared, values in writes:
            self._cursor.execute(*prepared.render(self._dialect, values))
        self._cursor.execute("COMMIT")
        return True


class _PostgresTransaction:
    """Explicit BEGIN and COMMIT on a connection in autocommit mode, to save their round trips."""

    _BEGIN = (
        "BEGIN ISOLATION LEVEL READ COMMITTED; "
        f"SELECT pg_advisory_xact_lock({LOCK_KEY}); {_READ_HEAD} FOR UPDATE"
    )
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
        return _query(self._cursor, self._dialect, statements)

    def commit(self, writes: Sequence[Statement], *, news: News | None) -> bool:
        with self._connection.pipeline():
            for prepared, values in writes:
                self._cursor.execute(*prepared.render(self._dialect, values), prepare=True)
            if news is not None:
                self._cursor.execute(f"NOTIFY {CHANNELS[news]}")
            self._cursor.execute("COMMIT")
        return True

    def roll_back(self) -> None:
        if self._connection.closed:
            return
        if self._connection.info.transaction_status != 0:
            self._connection.execute("ROLLBACK")


class _PostgresAttempt:
    """Reads without a lock; all writes are one statement that asks for the head it began with.

    Every change of a row moves the head in the same transaction, so that an unmoved head means
    that everything read since is still true. The head's row is locked first, then the others are
    written: the same order as under the lock, so the two cannot wait for each other.
    """

    def __init__(self, connection: Any, dialect: Dialect, head: Head | None) -> None:
        self._dialect = dialect
        self._cursor = connection.cursor()
        self._head = head

    @property
    def head(self) -> Head:
        """Read with the first query, or alone: never after a row that rests on it."""
        if self._head is None:
            self.query([])
        return self._head or _head_of(None)

    def query(self, statements: Sequence[Statement]) -> list[list[SqlRow]]:
        if self._head is not None:
            return _query(self._cursor, self._dialect, statements)
        head, *rows = _query(self._cursor, self._dialect, [(_HEAD, {}), *statements])
        self._head = _head_of(head[0] if head else None)
        return rows

    def commit(self, writes: Sequence[Statement], *, news: News | None) -> bool:
        conditional = [(prepared.if_moved, values) for prepared, values in writes]
        own = [(prepared, values) for prepared, values in conditional if prepared is not None]
        if len(own) < len(writes) or sum(len(values) for _, values in own) > _MOST_PARAMETERS:
            return False
        form = _silent_writes if news is None else _signalling_writes[news]
        self._cursor.execute(*form.render(self._dialect, own), prepare=True)
        return bool(self._cursor.rowcount == 1)

    def roll_back(self) -> None:
        """Nothing was begun."""


def _query(cursor: Any, dialect: Dialect, statements: Sequence[Statement]) -> list[list[SqlRow]]:
    if len(statements) == 1:
        ((prepared, values),) = statements
        return [cursor.execute(*prepared.render(dialect, values), prepare=True).fetchall()]
    widths = [prepared.columns for prepared, _ in statements]
    if all(widths):
        cursor.execute(*_one_row.render(dialect, statements), prepare=True)
        return _cut(cursor.fetchone(), widths)
    results: list[list[SqlRow]] = [[] for _ in statements]
    for number, row in cursor.execute(*_many_rows.render(dialect, statements), prepare=True):
        results[number].append(tuple(row.values()))
    return results


def _cut(row: SqlRow, widths: Sequence[int]) -> list[list[SqlRow]]:
    """The rows that stand side by side in one."""
    results: list[list[SqlRow]] = []
    start = 0
    for width in widths:
        part = row[start : start + width]
        results.append([] if part[0] is None else [part])
        start += width
    return results


class _Combination:
    """Several statements as one; written once for each sequence of statements.

    psycopg's pipeline takes as long for four queries as four round trips on a local socket.
    """

    def __init__(self, combine: Callable[[Sequence[str]], str]) -> None:
        self._combine = combine
        self._written: dict[tuple[Prepared, ...], tuple[str, list[dict[str, str]]]] = {}

    def render(
        self, dialect: Dialect, statements: Sequence[Statement]
    ) -> tuple[str, dict[str, Any]]:
        """SQL text and parameters; each statement's have names of their own."""
        key = tuple(prepared for prepared, _ in statements)
        written = self._written.get(key)
        if written is None:
            written = self._written[key] = self._write(dialect, statements)
        text, names = written
        given: dict[str, Any] = {}
        for own, (prepared, values) in zip(names, statements, strict=True):
            for source in (prepared.compiled(dialect)[2], values):
                for name, value in source.items():
                    given[own[name]] = value
        return text, given

    def _write(
        self, dialect: Dialect, statements: Sequence[Statement]
    ) -> tuple[str, list[dict[str, str]]]:
        texts: list[str] = []
        names: list[dict[str, str]] = []
        for number, (prepared, values) in enumerate(statements):
            text, _, literals = prepared.compiled(dialect)
            texts.append(text.replace("%(", f"%(p{number}_"))
            names.append({name: f"p{number}_{name}" for name in (*literals, *values)})
        return self._combine(texts), names


def _side_by_side(texts: Sequence[str]) -> str:
    """Queries of at most one row each as one row."""
    joins = " ".join(f"LEFT JOIN ({text}) q{n} ON true" for n, text in enumerate(texts))
    return f"SELECT {', '.join(f'q{n}.*' for n in range(len(texts)))} FROM (SELECT) one {joins}"  # noqa: S608 - our own


def _one_below_the_other(texts: Sequence[str]) -> str:
    """Any queries: (number of the query, row as a JSON object in column order)."""
    return " UNION ALL ".join(
        f"SELECT {n}, row_to_json(q{n}) FROM ({text}) q{n}"  # noqa: S608 - our own
        for n, text in enumerate(texts)
    )


def _at_once(texts: Sequence[str], then: str) -> str:
    """Writes of which the first moves the head: all of them, or none."""
    parts = ", ".join(f"{f'w{n}' if n else 'moved'} AS ({text})" for n, text in enumerate(texts))
    return f"WITH {parts} SELECT {then} FROM moved"  # noqa: S608 - our own


_one_row = _Combination(_side_by_side)
_many_rows = _Combination(_one_below_the_other)
_signalling_writes = {
    news: _Combination(partial(_at_once, then=f"pg_notify('{channel}', '')"))
    for news, channel in CHANNELS.items()
}
_silent_writes = _Combination(partial(_at_once, then="1"))


def _head_of(row: Any) -> Head:
    if row is None:
        raise Corrupted("the ledger has lost its head row", hint="restore it from a backup")
    return row[0], row[1], row[2], row[3]
