"""Signals: tell readers that something was committed. They only shorten a wait (DESIGN.md)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ledger.filewatch import changes

log = logging.getLogger(__name__)

_STOP_STEP_S: Final = 1.0
"""How often a quiet wait looks whether it should stop."""
_RECONNECT_FIRST_S: Final = 0.1
_RECONNECT_MOST_S: Final = 2.0
_KEEPALIVE: Final = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3}
"""A listener only reads, so without these it would never notice that its server's host is gone
(libpq; no effect on a Unix socket)."""


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
        """Block and yield at each notification until `stop` is set.

        A lost connection is made anew, with back-off. Each connection yields once before it
        waits: what was committed while nobody listened is news as well.
        """
        # without a pool, so that the connection is closed when this reader is done with it
        own = sa.create_engine(
            self._engine.url,
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args=_KEEPALIVE,
        )
        attempts = 0
        while not stop.is_set():
            try:
                for _ in self._listen(own, stop):
                    attempts = 0
                    yield
            except (sa.exc.DBAPIError, own.dialect.loaded_dbapi.Error) as error:
                log.debug("no notifications for now: %s", error)
                stop.wait(min(_RECONNECT_FIRST_S * 2**attempts, _RECONNECT_MOST_S))
                attempts += 1

    def _listen(self, own: Engine, stop: threading.Event) -> Iterator[None]:
        with own.connect() as connection:
            connection.exec_driver_sql(f"LISTEN {self.CHANNEL}")
            driver = connection.connection.driver_connection
            yield
            while driver is not None and not stop.is_set():
                for _ in driver.notifies(timeout=_STOP_STEP_S, stop_after=1):
                    yield


def signal_for(engine: Engine) -> Signal:
    """The signal of the ledger behind `engine`."""
    if engine.dialect.name == "sqlite":
        return FileSignal(Path(engine.url.database or ""))
    return NotifySignal(engine)
