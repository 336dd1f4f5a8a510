"""The statements of the append, in SQLAlchemy Core, compiled when first used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import Dialect

from policyline.ledger.db import schema
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.events import Event
from policyline.ledger.rows import ROW_TYPES, Row


def bind(name: str) -> sa.BindParameter[Any]:
    """A named parameter."""
    return sa.bindparam(name)


def any_of(column: sa.Column[str], values: Sequence[str]) -> sa.ColumnElement[bool]:
    """IN, written out: a statement that is compiled once cannot expand a list later."""
    return sa.or_(*(column == value for value in values))


def constant(text: str) -> sa.ColumnElement[str]:
    """A text in the statement itself: of a parameter no planner can prove a partial index right."""
    return sa.literal_column(f"'{text}'", sa.Text)


def columns_of(table: type[Row]) -> list[sa.Column[Any]]:
    """In the order of the row's fields, so that a result row is its arguments."""
    return [schema.PROJECTIONS[table].c[f.name] for f in fields(table)]


def _by_key(table: type[Row]) -> Prepared:
    key = schema.PROJECTIONS[table].primary_key
    columns = columns_of(table)
    query = sa.select(*columns).where(*(c == bind(c.name) for c in key))
    return Prepared(query, columns=len(columns))


def _insert(table: sa.Table) -> Prepared:
    """Every column but a generated id."""
    names = [c.name for c in table.columns if c.name != "id"]
    return Prepared(
        sa.insert(table).values({name: bind(name) for name in names}),
        if_moved=postgres_insert(table).from_select(names, _given(table, names)),
    )


def _upsert(table: sa.Table, dialect: str) -> Prepared:
    names, key = [c.name for c in table.columns], [c.name for c in table.primary_key]

    def on_conflict(statement: sqlite.Insert | postgresql.Insert) -> sa.Insert:
        rest = {name: statement.excluded[name] for name in names if name not in key}
        return statement.on_conflict_do_update(index_elements=key, set_=rest)

    if dialect == "sqlite":
        return Prepared(on_conflict(sqlite_insert(table)))
    conditional = postgres_insert(table).from_select(names, _given(table, names))
    return Prepared(on_conflict(postgres_insert(table)), if_moved=on_conflict(conditional))


def _given(table: sa.Table, names: Sequence[str]) -> sa.Select[Any]:
    """The parameters as one row, if the head was moved; see `transaction.Prepared`."""
    values = [sa.bindparam(name, type_=table.c[name].type) for name in names]
    return sa.select(*values).select_from(sa.table("moved"))


ROW_BY_KEY = {table: _by_key(table) for table in ROW_TYPES}
KEY_NAMES = {t: [c.name for c in schema.PROJECTIONS[t].primary_key] for t in ROW_TYPES}
FLAGS = {
    t: [i for i, c in enumerate(columns_of(t)) if isinstance(c.type, sa.Boolean)] for t in ROW_TYPES
}
"""Positions of booleans, which SQLite gives as 0 and 1."""

EVENT_COLUMNS = [schema.events.c[name] for name in Event.__slots__]
EVENT_BY_KEY = Prepared(
    sa.select(*EVENT_COLUMNS).where(schema.events.c.key == bind("key")), columns=len(EVENT_COLUMNS)
)
INSERT_EVENT = _insert(schema.events)
_MOVE = sa.update(schema.head).values(
    seq=bind("to_seq"), hash=bind("to_hash"), recorded_at=bind("to_time")
)
MOVE_HEAD = Prepared(
    _MOVE,
    if_moved=_MOVE.where(
        schema.head.c.seq == bind("from_seq"), schema.head.c.hash == bind("from_hash")
    ).returning(schema.head.c.seq),
)
INSERT_PHASE = _insert(schema.phases)
INSERT_ROLLOUT = Prepared(
    sa.insert(schema.rollouts).values(
        {c.name: bind(c.name) for c in schema.rollouts.columns if c.name != "id"}
    )
)
"""Under the lock only: a batch has an order, the parts of one statement run in none."""
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
looks at the changed row again, but not at `replicas`.
"""

_UPSERTS: dict[tuple[str, str], Prepared] = {}


def upsert(table: sa.Table, dialect: Dialect) -> Prepared:
    """Insert a row, or replace the one with the same primary key."""
    place = (table.name, dialect.name)
    if place not in _UPSERTS:
        _UPSERTS[place] = _upsert(table, dialect.name)
    return _UPSERTS[place]


def scan(table: type[Row], *where: sa.ColumnElement[bool]) -> Prepared:
    """Every row that matches."""
    return Prepared(sa.select(*columns_of(table)).where(*where))
