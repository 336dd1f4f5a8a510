"""A write and its signal, timed, without an event: whether a watcher here would work.

One row of `heartbeats` is written and removed again in one transaction, under the ledger's lock; no
event is appended and no projection changes. The signal is the real one, so every watcher and
router of this ledger reads it once more.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from policyline.ledger.db import schema
from policyline.ledger.db.waker import Waker
from policyline.ledger.store import Ledger

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.2
"""Between two writes until the listener is woken; nothing reports when LISTEN is in force."""
_STOP_S: Final = 2.0
_NOBODY: Final = {"line": "", "replica": "", "generation": 0, "counter": 0}
"""A heartbeat's row with names that no line or replica can have."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """How long it took, in seconds."""

    write_s: float
    """To take the lock, write and commit durably."""
    wake_s: float | None
    """From the beginning of the write to the wake-up of a listener; None when none came."""


def round_trip(ledger: Ledger, *, timeout_s: float) -> RoundTrip:
    """Write, and wait for the signal on a connection (or watch) of its own.

    Args:
        ledger: to try.
        timeout_s: longest wait for one signal.

    Raises:
        LedgerUnavailable: it cannot be written, or another process holds its lock.
    """
    woken, waker = threading.Event(), Waker()
    listener = threading.Thread(target=_listen, args=(ledger, woken, waker), daemon=True)
    listener.start()
    try:
        if not _is_listening(ledger, woken, timeout_s):
            return RoundTrip(_write(ledger), None)
        woken.clear()
        started = time.perf_counter()
        write_s = _write(ledger)
        wake_s = time.perf_counter() - started if woken.wait(timeout_s) else None
        return RoundTrip(write_s, wake_s)
    finally:
        waker.close()
        listener.join(_STOP_S)


def _is_listening(ledger: Ledger, woken: threading.Event, timeout_s: float) -> bool:
    """Write until the listener is woken."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        _write(ledger)
        if woken.wait(_RETRY_S):
            return True
    return False


def _listen(ledger: Ledger, woken: threading.Event, waker: Waker) -> None:
    """Not by `Ledger.follow`, which polls when there are no signals."""
    try:
        with waker:
            for _ in ledger.signal.listen(waker):
                woken.set()
    except Exception as error:  # noqa: BLE001 - whatever breaks a wait, no signal is the finding
        log.debug("no signals from the ledger: %s", error)


def _write(ledger: Ledger) -> float:
    started = time.perf_counter()
    table = schema.heartbeats
    with ledger.exclusive() as connection:
        connection.execute(sa.insert(table).values(**_NOBODY))
        connection.execute(sa.delete(table).where(table.c.line == "", table.c.replica == ""))
        ledger.signal.in_transaction(connection)
    return time.perf_counter() - started
