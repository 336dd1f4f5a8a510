"""The tables as SQLAlchemy knows them. `migrations/` creates them."""

from __future__ import annotations

import sqlalchemy as sa

from policyline.ledger.events import CURRENT_ROLLED_BACK, EPOCH_CLAIMED, RUN_OPENED
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, Row, RunRow, VersionRow

SCHEMA_REVISION = "0001"
"""The Alembic revision this release reads and writes; a test compares it with the only head."""

metadata = sa.MetaData()


def _integer(name: str, *, null: bool = False, key: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=null, primary_key=key, autoincrement=False)


def _rowid(name: str) -> sa.Column[int]:
    """A primary key that is SQLite's own rowid: no index next to the table."""
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return sa.Column(name, number, nullable=False, primary_key=True, autoincrement=False)


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=null, primary_key=key)


def _real(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=False)


def _boolean(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean, nullable=False)


head = sa.Table(
    "head",
    metadata,
    _rowid("id"),
    _text("ledger_id"),
    _integer("seq"),
    _text("hash"),
    _text("recorded_at"),
    sa.CheckConstraint("id = 1", name="head_is_one_row"),
)

events = sa.Table(
    "events",
    metadata,
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
sa.Index("events_by_version", events.c.line, events.c.version, events.c.seq)
_OF_REPLICA = events.c.replica.is_not(None) & events.c.version.is_(None)
sa.Index(
    "events_by_replica",
    events.c.line,
    events.c.replica,
    events.c.seq,
    sqlite_where=_OF_REPLICA,
    postgresql_where=_OF_REPLICA,
)
"""Joins, losses and incarnations: few among many, and asked for by every audit."""
EPOCH_KINDS = (RUN_OPENED, EPOCH_CLAIMED, CURRENT_ROLLED_BACK)
"""The kinds that give a line a new epoch."""
_OF_EPOCH = events.c.kind.in_(EPOCH_KINDS)
sa.Index(
    "events_by_epoch",
    events.c.line,
    events.c.epoch,
    sqlite_where=_OF_EPOCH,
    postgresql_where=_OF_EPOCH,
)
"""Few; a fenced process asks for them, perhaps repeatedly, while others wait for the lock."""

lines = sa.Table(
    "lines",
    metadata,
    _text("line", key=True),
    _integer("next_version"),
    _integer("epoch"),
    _text("open_run", null=True),
    _integer("current", null=True),
    _integer("candidate", null=True),
    _boolean("paused"),
)

runs = sa.Table(
    "runs",
    metadata,
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

versions = sa.Table(
    "versions",
    metadata,
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
_WAS_CURRENT = versions.c.became_current_seq.is_not(None)
sa.Index(
    "versions_by_current",
    versions.c.run,
    versions.c.became_current_seq,
    sqlite_where=_WAS_CURRENT,
    postgresql_where=_WAS_CURRENT,
)
_WAITING = (versions.c.state == "published") & versions.c.became_current_seq.is_(None)
sa.Index("versions_waiting", versions.c.run, sqlite_where=_WAITING, postgresql_where=_WAITING)
"""Few: each append that may name a candidate asks for them."""
sa.Index("versions_by_digest", versions.c.digest)
_SERVED = versions.c.pin == "serve"
sa.Index(
    "versions_pinned",
    versions.c.line,
    versions.c.version,
    sqlite_where=_SERVED,
    postgresql_where=_SERVED,
)
"""Few, and every view asks for them: with an index of all pins SQLite reads the whole line."""

replicas = sa.Table(
    "replicas",
    metadata,
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

residency = sa.Table(
    "residency",
    metadata,
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
sa.Index("residency_by_version", residency.c.line, residency.c.version)
_IN_FORCE = residency.c.state == "acked"
sa.Index(
    "residency_acked",
    residency.c.line,
    sqlite_where=_IN_FORCE,
    postgresql_where=_IN_FORCE,
)

heartbeats = sa.Table(
    "heartbeats",
    metadata,
    _text("line", key=True),
    _text("replica", key=True),
    _integer("generation"),
    _integer("counter"),
)

phases = sa.Table(
    "phases",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _integer("seq"),
    _text("line"),
    _text("run"),
    _integer("version"),
    _text("source"),
    _text("phase"),
    _real("duration_s"),
)
sa.Index("phases_by_run", phases.c.run, phases.c.phase)
sa.Index("phases_by_version", phases.c.line, phases.c.version)

rollouts = sa.Table(
    "rollouts",
    metadata,
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
sa.Index("rollouts_by_version", rollouts.c.line, rollouts.c.version, rollouts.c.id)
sa.Index("rollouts_by_time", rollouts.c.started_at)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    _text("line", key=True),
    _integer("seq", key=True),
    _text("state"),
)
"""What each line served after some events, so that as-of need not fold from the beginning."""

PROJECTIONS: dict[type[Row], sa.Table] = {
    LineRow: lines,
    RunRow: runs,
    VersionRow: versions,
    ReplicaRow: replicas,
    ResidencyRow: residency,
}
