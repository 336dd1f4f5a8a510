"""A pool of one connection that is kept: what a daemon costs its Postgres is one backend.

Reads, appends and the wait for signals of one process share it, one after another. Whoever finds
it busy for too long, as a heartbeat does while an append waits for the ledger's lock, gets a
connection of its own, which is closed after use.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.pool import ConnectionPoolEntry, Pool, PoolProxiedConnection

PATIENCE_S: Final = 0.25
"""Longer than any append or view takes alone; a new connection costs the server a process."""
MOST_MORE: Final = 7
"""Of the connections beside the kept one."""
_MORE_TIMEOUT_S: Final = 30.0


class KeptPool(Pool):
    """One connection is kept and shared in turn, more are opened while it is busy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: ConnectionPoolEntry | None = None
        self._free = threading.Lock()
        """Held by whoever uses the kept connection."""
        self._more = threading.BoundedSemaphore(MOST_MORE)
        self._caller = threading.local()
        self._disposed = False

    def connect_kept(self) -> PoolProxiedConnection:
        """The kept connection, however long it takes to get it."""
        self._caller.waits = True
        try:
            return self.connect()
        finally:
            self._caller.waits = False

    def has_news(self, listening: Any) -> bool:
        """Whether something lies unread on the kept connection, asked once nobody uses it.

        Without a checkout: a reader that waits for signals asks after each use of others.

        Args:
            listening: the driver's connection that listens; another one is news as well.
        """
        with self._free:
            driver = None if self._kept is None else self._kept.driver_connection
            return driver is not listening or driver.closed or is_readable(0, driver.fileno())

    def status(self) -> str:
        """For SQLAlchemy's own messages."""
        return f"KeptPool, the kept connection is {'in use' if self._free.locked() else 'free'}"

    def recreate(self) -> KeptPool:
        """A pool like this one, without connections."""
        return KeptPool(
            self._creator,
            recycle=self._recycle,
            echo=self.echo,
            logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return,
            pre_ping=self._pre_ping,
            _dispatch=self.dispatch,
            dialect=self._dialect,
        )

    def dispose(self) -> None:
        """Close the kept connection, now or when it is returned."""
        self._disposed = True
        if self._free.acquire(blocking=False):
            self._close_kept()
            self._free.release()

    def _close_kept(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _do_get(self) -> ConnectionPoolEntry:
        waits = getattr(self._caller, "waits", False)
        if self._free.acquire(timeout=-1 if waits else PATIENCE_S):
            try:
                if self._kept is None:
                    self._kept = self._create_connection()
            except BaseException:
                self._free.release()
                raise
            return self._kept
        if not self._more.acquire(timeout=_MORE_TIMEOUT_S):
            raise sa.exc.TimeoutError(f"{1 + MOST_MORE} connections are in use")
        try:
            return self._create_connection()
        except BaseException:
            self._more.release()
            raise

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if record is not self._kept:
            record.close()
            self._more.release()
            return
        if self._disposed:
            self._close_kept()
        self._free.release()


def is_still_there(driver: Any, _record: object, _proxy: object) -> None:
    """On checkout: whether the server has closed it meanwhile, without a round trip.

    Raises:
        sa.exc.DisconnectionError: it has; the pool opens another.
    """
    try:
        take_what_came(driver)
    except driver.OperationalError as error:
        raise sa.exc.DisconnectionError(f"the server closed the connection: {error}") from error


def take_what_came(driver: Any) -> None:
    """Read what an idle connection has received: notifications, or its end.

    Raises:
        The driver's OperationalError: its end.
    """
    while is_readable(0, driver.fileno()):
        driver.pgconn.consume_input()


def is_readable(within_s: float, *descriptors: int) -> bool:
    """Wait until one of the descriptors can be read (or is at its end), at most so long."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def kept_pool(engine: Engine) -> KeptPool:
    """The engine's pool, if it is one of these."""
    if not isinstance(engine.pool, KeptPool):
        raise TypeError(f"{engine.pool.status()} keeps no connection")
    return engine.pool


@contextmanager
def kept_connection(engine: Engine) -> Iterator[Any]:
    """The driver's kept connection, in autocommit mode; after an error it is given up."""
    pooled = kept_pool(engine).connect_kept()
    try:
        yield pooled.driver_connection
    except BaseException as error:
        pooled.invalidate(error)
        raise
    finally:
        pooled.close()
