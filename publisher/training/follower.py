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
        also: gives versions beyond the desired ones that are wanted in the view.
        seen: told of each view, in a thread of this; must be quick.
        poll_s: a signal only shortens the wait.
    """

    def __init__(
        self,
        ledger: Ledger,
        line: str,
        *,
        also: Callable[[], tuple[int, ...]],
        seen: Callable[[LineSnapshot], None],
        poll_s: float = 1.0,
    ) -> None:
        self._ledger = ledger
        self._line = line
        self._also = also
        self._seen = seen
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._away = False
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
            self._look()
            self._wake.wait(self._poll_s)

    def _look(self) -> None:
        try:
            view = self._ledger.view(self._line, also=self._also())
        except LedgerError as error:
            if not self._away:
                log.warning("the ledger is away: %s", error, extra={"event": "ledger_away"})
            self._away = True
            return
        self._away = False
        self._seen(view)
