"""The first schema: events, projections, heartbeats, phases."""

from __future__ import annotations

import uuid
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _integer(name: str, *, null: bool = False, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=null, primary_key=key, autoincrement=False)


def _rowid(name: str) -> sa.Column[Any]:
    """A primary key that is SQLite's own rowid: no index next to the table."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return sa.Column(name, number, nullable=False, primary_key=True, autoincrement=False)


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, nullable=null, primary_key=key)


def _real(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Double, nullable=False)


def _boolean(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Boolean, nullable=False)


def upgrade() -> None:
    """Create the tables, forbid changes of events, and give the ledger its identity."""
    _create_facts()
    _create_projections()
    _forbid_changes()
    head = sa.table(
        "head",
        sa.column("id"),
        sa.column("ledger_id"),
        sa.column("seq"),
        sa.column("hash"),
        sa.column("recorded_at"),
    )
    op.execute(
        head.insert().values(
            id=1,
            ledger_id=uuid.uuid4().hex,
            seq=0,
            hash="0" * 64,
            recorded_at="1970-01-01T00:00:00.000000+00:00",
        )
    )


def _create_facts() -> None:
    op.create_table(
        "head",
        _rowid("id"),
        _text("ledger_id"),
        _integer("seq"),
        _text("hash"),
        _text("recorded_at"),
        sa.CheckConstraint("id = 1", name="head_is_one_row"),
    )
    op.create_table(
        "events",
        _rowid("seq"),
        _text("line"),
        _text("run"),
        _text("kind"),
        _integer("version", null=True),
        _text("replica", null=True),
        _text("actor"),
        _integer("epoch", null=True),
        _integer("generation", null=True),
        _text("key"),
        _text("payload"),
        _text("recorded_at"),
        _text("prev_hash"),
        _text("hash"),
        sa.UniqueConstraint("key", name="events_key"),
    )
    op.create_table(
        "heartbeats",
        _text("line", key=True),
        _text("replica", key=True),
        _integer("generation"),
        _integer("counter"),
    )
    op.create_table(
        "phases",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        _integer("seq"),
        _text("line"),
        _text("run"),
        _integer("version"),
        _text("source"),
        _text("phase"),
        _real("duration_s"),
    )
    op.create_index("events_by_version", "events", ["line", "version", "seq"])
    of_replica = sa.text("replica IS NOT NULL AND version IS NULL")
    op.create_index(
        "events_by_replica",
        "events",
        ["line", "replica", "seq"],
        sqlite_where=of_replica,
        postgresql_where=of_replica,
    )
    of_epoch = sa.text("kind IN ('run_opened', 'epoch_claimed', 'current_rolled_back')")
    op.create_index(
        "events_by_epoch",
        "events",
        ["line", "epoch"],
        sqlite_where=of_epoch,
        postgresql_where=of_epoch,
    )
    op.create_index("phases_by_run", "phases", ["run", "phase"])
    op.create_index("phases_by_version", "phases", ["line", "version"])
    op.create_table(
        "rollouts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        _text("request"),
        _text("batch"),
        _text("line"),
        _text("run"),
        _integer("version"),
        _integer("staleness", null=True),
        _text("replica"),
        _text("asked_name"),
        _text("episode"),
        _integer("status"),
        _text("started_at"),
        _real("queue_s"),
        _real("prefill_s"),
        _real("decode_s"),
        _integer("prompt_tokens"),
        _integer("completion_tokens"),
        sa.UniqueConstraint("request", name="rollouts_request"),
    )
    op.create_index("rollouts_by_version", "rollouts", ["line", "version", "id"])
    op.create_index("rollouts_by_time", "rollouts", ["started_at"])


def _create_projections() -> None:
    op.create_table(
        "lines",
        _text("line", key=True),
        _integer("next_version"),
        _integer("epoch"),
        _text("open_run", null=True),
        _integer("current", null=True),
        _integer("candidate", null=True),
        _boolean("paused"),
    )
    op.create_table(
        "runs",
        _text("run", key=True),
        _text("line"),
        _text("state"),
        _integer("epoch"),
        _text("holder", null=True),
        _text("claimed_at"),
        _integer("max_staleness"),
        _integer("min_ready", null=True),
        _real("ready_grace_s"),
        _real("candidate_timeout_s"),
        _integer("opened_seq"),
        _text("opened_at"),
        _integer("closed_seq", null=True),
        _text("parent_run", null=True),
        _integer("parent_version", null=True),
    )
    op.create_table(
        "versions",
        _text("line", key=True),
        _integer("version", key=True),
        _text("run"),
        _integer("epoch"),
        _text("attempt"),
        _text("state"),
        _text("publisher"),
        _integer("reserved_seq"),
        _text("digest", null=True),
        _integer("size_bytes", null=True),
        _text("manifest", null=True),
        _integer("published_seq", null=True),
        _text("published_at", null=True),
        _integer("became_current_seq", null=True),
        _text("reason"),
        _text("pin"),
        _boolean("collected"),
    )
    op.create_table(
        "replicas",
        _text("line", key=True),
        _text("replica", key=True),
        _integer("generation"),
        _text("state"),
        _text("incarnation", null=True),
        _text("url"),
        _text("build"),
        _integer("max_loras", null=True),
        _integer("joined_seq"),
        _text("joined_at"),
        _text("reason"),
    )
    op.create_table(
        "residency",
        _text("line", key=True),
        _text("replica", key=True),
        _integer("version", key=True),
        _text("state"),
        _integer("generation"),
        _text("incarnation", null=True),
        _text("digest"),
        _text("build"),
        _text("probe"),
        _text("fetched_at", null=True),
        _integer("acked_seq", null=True),
        _text("acked_at", null=True),
        _integer("evicted_seq", null=True),
        _text("evicted_at", null=True),
        _integer("failures"),
        _text("reason"),
    )
    was_current = sa.text("became_current_seq IS NOT NULL")
    op.create_index(
        "versions_by_current",
        "versions",
        ["run", "became_current_seq"],
        sqlite_where=was_current,
        postgresql_where=was_current,
    )
    waiting = sa.text("state = 'published' AND became_current_seq IS NULL")
    op.create_index(
        "versions_waiting", "versions", ["run"], sqlite_where=waiting, postgresql_where=waiting
    )
    op.create_index("versions_by_digest", "versions", ["digest"])
    served = sa.text("pin = 'serve'")
    op.create_index(
        "versions_pinned",
        "versions",
        ["line", "version"],
        sqlite_where=served,
        postgresql_where=served,
    )
    op.create_index("residency_by_version", "residency", ["line", "version"])
    in_force = sa.text("state = 'acked'")
    op.create_index(
        "residency_acked",
        "residency",
        ["line"],
        sqlite_where=in_force,
        postgresql_where=in_force,
    )
    op.create_table(
        "checkpoints",
        _text("line", key=True),
        _integer("seq", key=True),
        _text("state"),
    )


def _forbid_changes() -> None:
    """Facts are append-only: the database itself refuses to change or remove them."""
    if op.get_bind().dialect.name == "sqlite":
        for table in ("events", "rollouts"):
            for verb in ("UPDATE", "DELETE"):
                op.execute(
                    f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} are append-only'); END"
                )
        # INSERT OR REPLACE deletes the old row without asking the trigger that forbids it
        for table, column in (("events", "seq"), ("events", "key"), ("rollouts", "request")):
            what = f"'{table} are append-only: {table}.{column} exists'"
            there = f"SELECT 1 FROM {table} WHERE {column} = NEW.{column}"  # noqa: S608 - our own
            op.execute(
                f"CREATE TRIGGER {table}_no_second_{column} BEFORE INSERT ON {table} "
                f"WHEN EXISTS ({there}) BEGIN SELECT RAISE(ABORT, {what}); END"
            )
        return
    op.execute(
        "CREATE FUNCTION policyline_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% are append-only', TG_TABLE_NAME; END $$"
    )
    for table in ("events", "rollouts"):
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION policyline_append_only()"
        )
