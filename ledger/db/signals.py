"""Signals: notify readers that something was committed. They only shorten a wait (DESIGN.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from policyline.ledger.db.filewatch import changes
from policyline.ledger.db.pool import shared_connection, shared_pool, take_what_came
from policyline.ledger.db.waker import Waker, is_readable

log = logging.getLogger(__name__)

_CHECK_S: Final = 1.0
"""How often a quiet wait checks that its connection is still the shared one: closing a descriptor
wakes no thread that waits for it."""
_RECONNECT_FIRST_S: Final = 0.1
_RECONNECT_MOST_S: Final = 2.0

ChangeKind = Literal["desired", "detail"]
"""What was committed: something that may change a desired set, or only `events.DETAILS`."""
CHANNELS: Final[Mapping[ChangeKind, str]] = {"desired": "policyline", "detail": "policyline_detail"}
"""Of Postgres. Two, so that the server sends nothing to a reader that wants no details: in a fleet
of 64 each version has 64 acks, which would be 4,096 messages."""


class Signal(Protocol):
    """Raises and awaits the signal of one ledger."""

    def in_transaction(self, connection: Connection) -> None:
        """Raise it so that it is seen when, and only when, the transaction commits."""

    def after_commit(self) -> None:
        """Raise it now that the commit is visible."""

    def listen(
        self, waker: Waker, *, details: bool = True, timeout_s: float | None = None
    ) -> Iterator[None]:
        """Block and yield: once at the start, at each signal, at each notification of the waker.

        Ends when the waker is closed. For `Follower`, which everybody else uses.

        Args:
            waker: wakes and ends it.
            details: also for events of `events.DETAILS`.
            timeout_s: yield also when nothing came for so long.

        Raises:
            OSError: the system cannot watch any more files.
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

    def listen(
        self,
        waker: Waker,
        *,
        details: bool = True,  # noqa: ARG002 - a touch does not say what was committed
        timeout_s: float | None = None,
    ) -> Iterator[None]:
        """Block and yield at each touch."""
        yield from changes(self._file, waker, timeout_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    waker: Waker
    channels: tuple[str, ...]


class NotifySignal:
    """Postgres: NOTIFY inside the transaction, delivered by the server at its commit.

    A reader waits on its process's shared connection (`pool`) while that is free; what arrives
    while it is in use notifies the reader's waker.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners: set[_Listener] = set()
        sa.event.listen(engine, "connect", self._set_up)

    def in_transaction(self, connection: Connection) -> None:
        """NOTIFY; the server sends it when the transaction commits."""
        connection.execute(sa.text(f"NOTIFY {CHANNELS['desired']}"))

    def after_commit(self) -> None:
        """Nothing: the server has sent it."""

    def listen(
        self, waker: Waker, *, details: bool = True, timeout_s: float | None = None
    ) -> Iterator[None]:
        """Block and yield at each notification.

        A lost connection is opened again, with back-off. Each connection yields once before it
        waits: something may have been committed while nobody listened.
        """
        channels = tuple(name for kind, name in CHANNELS.items() if details or kind != "detail")
        listener = _Listener(waker, channels)
        self._listeners.add(listener)
        try:
            yield from self._wait(listener, timeout_s)
        finally:
            self._listeners.discard(listener)

    def _wait(self, listener: _Listener, timeout_s: float | None) -> Iterator[None]:
        waker, listening, failures = listener.waker, None, 0
        yielded_s = time.monotonic()
        while not waker.closed:
            descriptors, wait_s = [waker.fileno()], _CHECK_S
            try:
                if listening is None or shared_pool(self._engine).has_unread(listening):
                    listening = self._read(listening, listener)
                descriptors.append(listening.fileno())
                failures = 0
            except (sa.exc.DBAPIError, self._engine.dialect.loaded_dbapi.Error) as error:
                log.debug("no notifications for now: %s", error)
                wait_s = min(_RECONNECT_FIRST_S * 2**failures, _RECONNECT_MOST_S)
                failures += 1
            left_s = _left_s(timeout_s, yielded_s)
            if waker.clear() or left_s <= 0:
                if not waker.closed:
                    yield
                yielded_s = time.monotonic()
            else:
                is_readable(min(wait_s, left_s), *descriptors)

    def _read(self, listening: Any, listener: _Listener) -> Any:
        """Take what has arrived on the shared connection; return it, listening."""
        with shared_connection(self._engine) as driver:
            if driver is not listening:
                for channel in listener.channels:
                    driver.execute(f"LISTEN {channel}")
                listener.waker.notify()
            take_what_came(driver)
            while (notification := driver.pgconn.notifies()) is not None:
                self._notify(notification.relname.decode())
            return driver

    def _set_up(self, driver: Any, _record: object) -> None:
        driver.add_notify_handler(lambda notification: self._notify(notification.channel))

    def _notify(self, channel: str) -> None:
        for listener in tuple(self._listeners):
            if channel in listener.channels:
                listener.waker.notify()


def _left_s(timeout_s: float | None, since_s: float) -> float:
    if timeout_s is None:
        return float("inf")
    return since_s + timeout_s - time.monotonic()


def signal_for(engine: Engine) -> Signal:
    """The signal of the ledger behind `engine`."""
    if engine.dialect.name == "sqlite":
        return FileSignal(Path(engine.url.database or ""))
    return NotifySignal(engine)
