"""Reads a line's snapshot whenever the ledger changes, in a thread of its own. Never writes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from policyline.ledger.errors import LedgerError
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.store import Ledger

log = logging.getLogger(__name__)


class SnapshotThread:
    """Reads the line at once, after every signal, and at least every `poll_s` seconds.

    Args:
        ledger: stays open when this closes.
        line: the line.
        extra_versions: returns versions to read besides the desired ones.
        on_snapshot: called with each snapshot, in the thread; must be quick.
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
        self._follower = ledger.follow(poll_s=poll_s)
        self._thread = threading.Thread(target=self._run, name="policyline-follow", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Read now."""
        self._follower.wake()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._follower.close()
        self._thread.join()

    def _run(self) -> None:
        unavailable = False
        for _ in self._follower:
            try:
                snapshot = self._ledger.view(self._line, also=self._extra_versions())
            except LedgerError as error:
                if not unavailable:
                    log.warning(
                        "the ledger is unreachable: %s",
                        error,
                        extra={"event": "ledger_unreachable"},
                    )
                unavailable = True
            else:
                unavailable = False
                self._on_snapshot(snapshot)
