"""Statements in SQLAlchemy Core, compiled when first used, and rows made of their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Dialect

from policyline.ledger.db import schema
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.events import Event
from policyline.ledger.rows import ROW_TYPES, Row

R = TypeVar("R", bound=Row)


def bind(name: str) -> sa.BindParameter[Any]:
    """A named parameter."""
    return sa.bindparam(name)


def constant(text: str) -> sa.ColumnElement[str]:
    """A text in the statement itself: of a parameter no planner can prove a partial index right."""
    return sa.literal_column(f"'{text}'", sa.Text)


def columns_of(table: type[Row]) -> list[sa.Column[Any]]:
    """In the order of the row's fields, so that a result row is its arguments."""
    return [schema.PROJECTIONS[table].c[f.name] for f in fields(table)]


def _by_key(table: type[Row]) -> Prepared:
    key = schema.PROJECTIONS[table].primary_key
    return scan(table, *(c == bind(c.name) for c in key))


def _insert(table: sa.Table) -> Prepared:
    """Every column but a generated id."""
    names = [c.name for c in table.columns if c.name != "id"]
    return Prepared(sa.insert(table).values({name: bind(name) for name in names}))


def scan(table: type[Row], *where: sa.ColumnElement[bool]) -> Prepared:
    """Every row that matches."""
    return Prepared(sa.select(*columns_of(table)).where(*where))


ROW_BY_KEY = {table: _by_key(table) for table in ROW_TYPES}
KEY_NAMES = {t: [c.name for c in schema.PROJECTIONS[t].primary_key] for t in ROW_TYPES}
FLAGS = {
    t: [i for i, c in enumerate(columns_of(t)) if isinstance(c.type, sa.Boolean)] for t in ROW_TYPES
}
"""Positions of booleans, which SQLite gives as 0 and 1."""

EVENT_COLUMNS = [schema.events.c[name] for name in Event.__slots__]
EVENT_BY_KEY = Prepared(sa.select(*EVENT_COLUMNS).where(schema.events.c.key == bind("key")))
INSERT_EVENT = _insert(schema.events)
MOVE_HEAD = Prepared(
    sa.update(schema.head).values(
        seq=bind("to_seq"), hash=bind("to_hash"), recorded_at=bind("to_time")
    )
)
INSERT_PHASE = _insert(schema.phases)
INSERT_ROLLOUT = _insert(schema.rollouts)
EVENT_OF_EPOCH = Prepared(
    sa.select(*EVENT_COLUMNS)
    .where(
        schema.events.c.line == bind("line"),
        schema.events.c.epoch == bind("epoch"),
        schema.events.c.kind.in_([constant(kind) for kind in schema.EPOCH_KINDS]),
    )
    .order_by(schema.events.c.seq.desc())
    .limit(1)
)
READ_HEARTBEAT = Prepared(
    sa.select(schema.heartbeats.c.generation, schema.heartbeats.c.counter)
    .where(schema.heartbeats.c.line == bind("line"), schema.heartbeats.c.replica == bind("replica"))
    .with_for_update()
)
"""Locked, because a beat takes no lock but this row's."""

BEAT = Prepared(
    sa.update(schema.heartbeats)
    .where(
        schema.heartbeats.c.line == bind("of_line"),
        schema.heartbeats.c.replica == bind("of_replica"),
        schema.heartbeats.c.generation == bind("with_generation"),
        sa.exists().where(
            schema.replicas.c.line == bind("of_line"),
            schema.replicas.c.replica == bind("of_replica"),
            schema.replicas.c.generation == bind("with_generation"),
            schema.replicas.c.state == "joined",
        ),
    )
    .values(counter=bind("to_counter"))
)
"""Moves the counter of a replica only while it is joined with this generation.

Asking the row itself as well matters to one that waits for it while a newer watcher joins: Postgres
reads the changed row again, but not `replicas`.
"""

_UPSERTS: dict[tuple[str, str], Prepared] = {}


def upsert(table: sa.Table, dialect: Dialect) -> Prepared:
    """Insert a row, or replace the one with the same primary key."""
    name = (table.name, dialect.name)
    if name not in _UPSERTS:
        insert = sqlite.insert if dialect.name == "sqlite" else postgresql.insert
        statement = insert(table)
        key = [c.name for c in table.primary_key]
        rest = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in key}
        upserting = statement.on_conflict_do_update(index_elements=key, set_=rest)
        _UPSERTS[name] = Prepared(upserting)
    return _UPSERTS[name]


def row_of(table: type[R], values: Sequence[Any]) -> R:
    """A projection's row from the driver's values, in the order of its fields."""
    arguments: list[Any] = list(values)
    for position in FLAGS[table]:
        arguments[position] = bool(arguments[position])
    return table(*arguments)


def driver_rows(
    connection: Connection, statement: Prepared, values: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """The driver's own rows: a million of them without the cost of SQLAlchemy's."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(*statement.render(connection.dialect, values))
        return list(cursor.fetchall())
    finally:
        cursor.close()


def read_rows(
    connection: Connection, statement: Prepared, table: type[R], values: Mapping[str, Any]
) -> list[R]:
    """The rows of a projection."""
    return [row_of(table, row) for row in read_all(connection, statement, values)]


def read_all(
    connection: Connection, statement: Prepared, values: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """What a statement returns, row by row."""
    rendered = statement.render(connection.dialect, values)
    return [tuple(row) for row in connection.exec_driver_sql(*rendered)]
