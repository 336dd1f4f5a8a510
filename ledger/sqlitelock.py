"""SQLite's write lock, asked for often enough that nobody starves.

SQLite's own busy handler waits 100 ms between two looks once it has waited a little (`sqlite3.c`,
`sqliteDefaultBusyCallback`): while others append without a pause it finds the lock taken each time,
and eight busy writers leave one of them behind for longer than any sensible timeout.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final

_LOOK_MS: Final = 20
"""After which SQLite begins anew with waits of 1, 2, 5 and 10 ms."""


def begin_immediate(cursor: sqlite3.Cursor, timeout_s: float) -> None:
    """Begin a transaction that holds the write lock.

    Raises:
        sqlite3.OperationalError: others have held it for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    cursor.execute(f"PRAGMA busy_timeout = {_LOOK_MS}")
    try:
        while True:
            try:
                cursor.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            else:
                return
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}")
