"""Signals: tell readers that something was committed. They only shorten a wait (DESIGN.md)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ledger.filewatch import changes


class Signal(Protocol):
    """Raises and awaits the signal of one ledger."""

    def in_transaction(self, connection: Connection) -> None:
        """Raise it so that it is seen when, and only when, the transaction commits."""

    def after_commit(self) -> None:
        """Raise it now that the commit is visible."""

    def wakes(self, stop: threading.Event) -> Iterator[None]:
        """Block and yield at each signal until `stop` is set. One reader per call."""


class FileSignal:
    """SQLite: touch `<database>.signal` after the commit, and watch that file.

    Watching the WAL instead would wake readers before the commit is visible to them.
    """

    def __init__(self, database: Path) -> None:
        self._file = database.with_name(f"{database.name}.signal")

    def in_transaction(self, connection: Connection) -> None:
        """Nothing: a file cannot be touched by a transaction."""

    def after_commit(self) -> None:
        """Touch the file. A failure only costs readers a poll, so it is no error."""
        try:
            self._file.touch()
        except OSError:
            return

    def wakes(self, stop: threading.Event) -> Iterator[None]:
        """Block and yield at each touch until `stop` is set."""
        yield from changes(self._file, stop)


class NotifySignal:
    """Postgres: NOTIFY inside the transaction, delivered by the server at its commit."""

    CHANNEL = "policyline"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def in_transaction(self, connection: Connection) -> None:
        """NOTIFY; the server sends it when the transaction commits."""
        connection.execute(sa.text(f"NOTIFY {self.CHANNEL}"))

    def after_commit(self) -> None:
        """Nothing: the server has sent it."""

    def wakes(self, stop: threading.Event) -> Iterator[None]:
        """Block and yield at each notification until `stop` is set."""
        # without a pool, so that the connection is closed when this reader is done with it
        own = sa.create_engine(
            self._engine.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
        )
        with own.connect() as connection:
            connection.exec_driver_sql(f"LISTEN {self.CHANNEL}")
            driver = connection.connection.driver_connection
            if driver is None:
                return
            while not stop.is_set():
                for _ in driver.notifies(timeout=1.0, stop_after=1):
                    yield


def signal_for(engine: Engine) -> Signal:
    """The signal of the ledger behind `engine`."""
    if engine.dialect.name == "sqlite":
        return FileSignal(Path(engine.url.database or ""))
    return NotifySignal(engine)
