"""SQLite's write lock, asked for often enough that nobody starves.

SQLite's own busy handler waits 100 ms between two looks once it has waited a little (`sqlite3.c`,
`sqliteDefaultBusyCallback`): while others append without a pause it finds the lock taken each time,
and eight busy writers leave one of them behind for longer than any sensible timeout.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LOOK_MS: Final = 20
"""After which SQLite begins anew with waits of 1, 2, 5 and 10 ms."""


def begin_immediate(cursor: sqlite3.Cursor, timeout_s: float) -> None:
    """Begin a transaction that holds the write lock.

    Raises:
        sqlite3.OperationalError: others have held it for `timeout_s`.
    """
    cursor.execute(f"PRAGMA busy_timeout = {_LOOK_MS}")
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
    """One connection that is kept for appends: taking it from a pool costs a tenth of an append.

    In WAL mode only BEGIN waits for others, so that its short busy timeout is set once; with a
    rollback journal COMMIT waits for readers and needs the long one. After an error of the driver
    the connection is given up.

    Args:
        connect: opens one that has explicit transactions and may change threads.
        timeout_s: how long to wait for other writers, of this process or of others.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._short = False
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
                if self._short:
                    _begin(connection.cursor(), deadline)
                else:
                    begin_immediate(connection.cursor(), self._timeout_s)
                try:
                    yield connection
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            except sqlite3.Error:
                connection.close()
                raise
            except BaseException:
                self._keep(connection)
                raise
            self._keep(connection)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close it, now or when it is free. Idempotent; who appends later opens another."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._lock.release()

    def _keep(self, connection: sqlite3.Connection) -> None:
        if self._closed:
            connection.close()
        else:
            self._connection = connection

    def _open(self) -> sqlite3.Connection:
        connection = self._connect()
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        self._short = mode == "wal"
        if self._short:
            connection.execute(f"PRAGMA busy_timeout = {_LOOK_MS}")
        return connection
