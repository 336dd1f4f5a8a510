"""SQLite's write lock, requested often enough that no writer starves.

SQLite's own busy handler waits 100 ms between two attempts once it has waited a little
(`sqlite3.c`, `sqliteDefaultBusyCallback`): while others append without a pause it finds the lock
taken each time, and one of eight busy writers then waits longer than any sensible timeout.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_RETRY_MS: Final = 20
"""After which SQLite starts again with waits of 1, 2, 5 and 10 ms."""


def begin_immediate(cursor: sqlite3.Cursor, timeout_s: float) -> None:
    """Begin a transaction that holds the write lock.

    Raises:
        sqlite3.OperationalError: others have held it for `timeout_s`.
    """
    cursor.execute(f"PRAGMA busy_timeout = {_RETRY_MS}")
    try:
        _begin(cursor, time.monotonic() + timeout_s)
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}")


def _begin(cursor: sqlite3.Cursor, deadline: float) -> None:
    while True:
        try:
            cursor.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        else:
            return


class WriteConnection:
    """One connection for all appends: taking it from a pool costs a tenth of an append.

    In WAL mode only BEGIN waits for others, so that its short busy timeout is set once. After an
    error of the driver the connection is closed.

    Args:
        connect: opens one that has explicit transactions and may change threads.
        timeout_s: how long to wait for other writers, of this process or of others.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the write lock; rolled back if it is not committed.

        Raises:
            sqlite3.OperationalError: others have held the lock for too long.
        """
        deadline = time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=self._timeout_s):
            raise sqlite3.OperationalError("database is locked by another thread")
        try:
            connection = self._connection or self._open()
            self._connection = None  # until nothing has gone wrong
            try:
                _begin(connection.cursor(), deadline)
                try:
                    yield connection
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            except sqlite3.Error:
                connection.close()
                raise
            except BaseException:
                self._put_back(connection)
                raise
            self._put_back(connection)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close it, now or when it is free. Idempotent; a later append opens another."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._lock.release()

    def _put_back(self, connection: sqlite3.Connection) -> None:
        if self._closed:
            connection.close()
        else:
            self._connection = connection

    def _open(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute(f"PRAGMA busy_timeout = {_RETRY_MS}")
        return connection
