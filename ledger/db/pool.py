"""A pool of one shared connection: what a daemon costs its Postgres is one backend.

Reads, appends and the wait for signals of one process use it, one after another. A caller that
finds it busy for too long, as a heartbeat does while an append waits for the ledger's lock, gets
a connection of its own, which is closed after use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.pool import ConnectionPoolEntry, Pool, PoolProxiedConnection

from policyline.ledger.db.waker import is_readable

PATIENCE_S: Final = 0.25
"""Longer than any append or view takes alone; a new connection costs the server a process."""
MAX_EXTRA: Final = 7
"""Connections beyond the shared one."""
_EXTRA_TIMEOUT_S: Final = 30.0


class SharedConnectionPool(Pool):
    """One connection is shared in turn, more are opened while it is busy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared: ConnectionPoolEntry | None = None
        self._free = threading.Lock()
        """Held by the user of the shared connection."""
        self._extra = threading.BoundedSemaphore(MAX_EXTRA)
        self._caller = threading.local()
        self._disposed = False

    def connect_shared(self) -> PoolProxiedConnection:
        """The shared connection, however long it takes to get it."""
        self._caller.waits = True
        try:
            return self.connect()
        finally:
            self._caller.waits = False

    def has_unread(self, listening: Any) -> bool:
        """Whether something lies unread on the shared connection, asked once nobody uses it.

        Without a checkout: a reader that waits for signals asks after each use of others.

        Args:
            listening: the driver's connection that listens; that it is another one counts as well.
        """
        with self._free:
            driver = None if self._shared is None else self._shared.driver_connection
            return driver is not listening or driver.closed or is_readable(0, driver.fileno())

    def status(self) -> str:
        """For SQLAlchemy's own messages."""
        state = "in use" if self._free.locked() else "free"
        return f"{type(self).__name__}, the shared connection is {state}"

    def recreate(self) -> SharedConnectionPool:
        """A pool like this one, without connections."""
        return SharedConnectionPool(
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
        """Close the shared connection, now or when it is returned."""
        self._disposed = True
        if self._free.acquire(blocking=False):
            self._close_shared()
            self._free.release()

    def _close_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _do_get(self) -> ConnectionPoolEntry:
        waits = getattr(self._caller, "waits", False)
        if self._free.acquire(timeout=-1 if waits else PATIENCE_S):
            try:
                if self._shared is None:
                    self._shared = self._create_connection()
            except BaseException:
                self._free.release()
                raise
            return self._shared
        if not self._extra.acquire(timeout=_EXTRA_TIMEOUT_S):
            raise sa.exc.TimeoutError(f"{1 + MAX_EXTRA} connections are in use")
        try:
            return self._create_connection()
        except BaseException:
            self._extra.release()
            raise

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if record is not self._shared:
            record.close()
            self._extra.release()
            return
        if self._disposed:
            self._close_shared()
        self._free.release()


def check_open(driver: Any, _record: object, _proxy: object) -> None:
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


def shared_pool(engine: Engine) -> SharedConnectionPool:
    """The engine's pool, if it is one of these."""
    if not isinstance(engine.pool, SharedConnectionPool):
        raise TypeError(f"{engine.pool.status()} shares no connection")
    return engine.pool


@contextmanager
def shared_connection(engine: Engine) -> Iterator[Any]:
    """The driver's shared connection, in autocommit mode; after an error it is closed."""
    pooled = shared_pool(engine).connect_shared()
    try:
        yield pooled.driver_connection
    except BaseException as error:
        pooled.invalidate(error)
        raise
    finally:
        pooled.close()
