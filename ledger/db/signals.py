"""Signals: tell readers that something was committed. They only shorten a wait (DESIGN.md)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from policyline.ledger.db.filewatch import changes
from policyline.ledger.db.pool import is_readable, kept_connection, kept_pool, take_what_came

log = logging.getLogger(__name__)

_STOP_STEP_S: Final = 1.0
"""How often a quiet wait looks whether it should stop."""
_RECONNECT_FIRST_S: Final = 0.1
_RECONNECT_MOST_S: Final = 2.0


News = Literal["desired", "detail"]
"""What was committed: something that may change a desired set, or only `events.DETAILS`."""
CHANNELS: Final[Mapping[News, str]] = {"desired": "policyline", "detail": "policyline_detail"}
"""Of Postgres. Two, so that the server sends nothing to a reader that wants no details: in a fleet
of 64 each version has 64 acks, which would be 4,096 messages."""


class Signal(Protocol):
    """Raises and awaits the signal of one ledger."""

    def in_transaction(self, connection: Connection) -> None:
        """Raise it so that it is seen when, and only when, the transaction commits."""

    def after_commit(self) -> None:
        """Raise it now that the commit is visible."""

    def wakes(self, stop: threading.Event, *, details: bool = True) -> Iterator[None]:
        """Block and yield at each signal until `stop` is set. One reader per call.

        Args:
            stop: ends it, within a second.
            details: also for events of `events.DETAILS`. A hint: where signals carry no words,
                as on SQLite, every one of them counts.
        """


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

    def wakes(self, stop: threading.Event, *, details: bool = True) -> Iterator[None]:  # noqa: ARG002 - a touch has no words
        """Block and yield at each touch until `stop` is set."""
        yield from changes(self._file, stop)


class NotifySignal:
    """Postgres: NOTIFY inside the transaction, delivered by the server at its commit.

    A reader waits on the connection that its process keeps (`pool`) while nobody uses it;
    what arrives while somebody does rings a bell.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bells: set[_Bell] = set()
        sa.event.listen(engine, "connect", self._set_up)

    def in_transaction(self, connection: Connection) -> None:
        """NOTIFY; the server sends it when the transaction commits."""
        connection.execute(sa.text(f"NOTIFY {CHANNELS['desired']}"))

    def after_commit(self) -> None:
        """Nothing: the server has sent it."""

    def wakes(self, stop: threading.Event, *, details: bool = True) -> Iterator[None]:
        """Block and yield at each notification until `stop` is set.

        A lost connection is made anew, with back-off. Each connection yields once before it
        waits: what was committed while nobody listened is news as well.
        """
        with _Bell(details=details) as bell:
            self._bells.add(bell)
            try:
                yield from self._wakes(stop, bell)
            finally:
                self._bells.discard(bell)

    def _wakes(self, stop: threading.Event, bell: _Bell) -> Iterator[None]:
        listening: Any = None
        attempts = 0
        while not stop.is_set():
            try:
                if listening is None or kept_pool(self._engine).has_news(listening):
                    listening = self._look(listening, bell)
                descriptor = listening.fileno()
                attempts = 0
            except (sa.exc.DBAPIError, self._engine.dialect.loaded_dbapi.Error) as error:
                log.debug("no notifications for now: %s", error)
                stop.wait(min(_RECONNECT_FIRST_S * 2**attempts, _RECONNECT_MOST_S))
                attempts += 1
                continue
            if bell.has_rung():
                yield
            else:
                is_readable(_STOP_STEP_S, descriptor, bell.fileno())

    def _look(self, listening: Any, bell: _Bell) -> Any:
        """Take what has arrived on the kept connection; return it, listening."""
        with kept_connection(self._engine) as driver:
            if driver is not listening:
                for channel in bell.channels:
                    driver.execute(f"LISTEN {channel}")
                bell.ring()
            take_what_came(driver)
            while (news := driver.pgconn.notifies()) is not None:
                self._ring(news.relname.decode())
            return driver

    def _set_up(self, driver: Any, _record: object) -> None:
        driver.add_notify_handler(lambda notification: self._ring(notification.channel))

    def _ring(self, channel: str) -> None:
        for bell in tuple(self._bells):
            if channel in bell.channels:
                bell.ring()


class _Bell:
    """Wakes one reader that waits in `is_readable`."""

    def __init__(self, *, details: bool) -> None:
        self.channels = [name for news, name in CHANNELS.items() if details or news != "detail"]
        """Those for which it rings."""
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.settimeout(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reading.close()
        self._writing.close()

    def fileno(self) -> int:
        return self._reading.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it has been rung often enough; or closed
            self._writing.send(b"!")

    def has_rung(self) -> bool:
        """Whether it has been rung since it was last asked."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._reading.recv(_BELL_BYTES))
        return False


_BELL_BYTES: Final = 65536


def signal_for(engine: Engine) -> Signal:
    """The signal of the ledger behind `engine`."""
    if engine.dialect.name == "sqlite":
        return FileSignal(Path(engine.url.database or ""))
    return NotifySignal(engine)
