"""The lock that makes appends serial."""

from __future__ import annotations

from typing import Final

from sqlalchemy.engine import Connection

from policyline.ledger.db import connect as connections

LOCK_KEY: Final = 7_074_936_512_246_801
"""Postgres advisory lock of the append: one writer at a time, so that seq order is commit order
and a reader that follows the events cannot pass a gap that is filled later."""

TAKE_LOCK: Final = f"SELECT pg_advisory_xact_lock({LOCK_KEY})"
"""On Postgres; SQLite's `BEGIN IMMEDIATE` is its lock."""


def take_lock(connection: Connection) -> None:
    """Take the ledger's lock in a plain transaction; SQLite's began with it."""
    if connection.dialect.name != "sqlite":
        timeout_ms = int(connections.BUSY_TIMEOUT_S * 1000)
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {timeout_ms}")
        connection.exec_driver_sql(TAKE_LOCK)
