"""Follows a line in the ledger: what is current, and who serves it. Never writes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from policyline.ledger.errors import LedgerError
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.store import Ledger

log = logging.getLogger(__name__)


class Follower:
    """Reads the line after every signal, and at least every `poll_s` seconds, in its own threads.

    Args:
        ledger: stays open when this closes.
        line: the line.
        extra_versions: returns versions to read besides the desired ones.
        on_snapshot: called with each snapshot, in a thread of this; must be quick.
        poll_s: longest wait between two reads; a signal only shortens it.
    """

    def __init__(
        self,
        ledger: Ledger,
        line: str,
        *,
        extra_versions: Callable[[], tuple[int, ...]],
        on_snapshot: Callable[[LineSnapshot], None],
        poll_s: float = 1.0,
    ) -> None:
        self._ledger = ledger
        self._line = line
        self._extra_versions = extra_versions
        self._on_snapshot = on_snapshot
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._unavailable = False
        self._threads = [
            threading.Thread(target=target, name=f"policyline-{name}", daemon=True)
            for name, target in (("signals", self._listen), ("follow", self._follow))
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Read now."""
        self._wake.set()

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        for _ in self._ledger.signal.wakes(self._stop):
            self._wake.set()

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()  # before the read: what is committed during it wakes again
            self._read()
            self._wake.wait(self._poll_s)

    def _read(self) -> None:
        try:
            snapshot = self._ledger.view(self._line, also=self._extra_versions())
        except LedgerError as error:
            if not self._unavailable:
                log.warning(
                    "the ledger is unreachable: %s", error, extra={"event": "ledger_unreachable"}
                )
            self._unavailable = True
            return
        self._unavailable = False
        self._on_snapshot(snapshot)
