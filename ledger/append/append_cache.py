"""What the last append of this process read and wrote, for the next one.

It is true while nobody else appends, and whoever uses it writes on that condition only: one round
trip less where a publisher or a sidecar appends alone. Where many append it would be a wasted one,
so that a miss silences it for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from policyline.ledger.db.transaction import Head
from policyline.ledger.rows import Row

Place = tuple[type[Row], tuple[str | int, ...]]

_FRESH_S: Final = 1.0
"""`repair-projections` mends rows and leaves the head: what is older is not worth that risk."""
_SILENT: Final = 8
"""Appends after a miss that do not try."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The head and the rows (None: there is none) as one append left them."""

    head: Head
    rows: Mapping[Place, Row | None]


class Memory:
    """Keeps one `Recent`; thread-safe: whoever takes it has it alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: Recent | None = None
        self._kept_at = 0.0
        self._silent = 0

    def take(self) -> Recent | None:
        """What is remembered, once; None when it is old or has misled lately."""
        with self._lock:
            recent, self._recent = self._recent, None
            if self._silent > 0:
                self._silent -= 1
                return None
            return recent if time.monotonic() - self._kept_at < _FRESH_S else None

    def at(self, head: Head) -> Mapping[Place, Row | None]:
        """The rows that are still true, for one who holds the lock and has read the head."""
        with self._lock:
            recent, self._recent = self._recent, None
            fresh = time.monotonic() - self._kept_at < _FRESH_S
        return recent.rows if recent is not None and fresh and recent.head == head else {}

    def tell(self, *, hit: bool) -> None:
        """Whether what was taken was still true."""
        if not hit:
            with self._lock:
                self._silent = _SILENT

    def keep(self, recent: Recent) -> None:
        """Remember it for the next append."""
        with self._lock:
            self._recent = recent
            self._kept_at = time.monotonic()
