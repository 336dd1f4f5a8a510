"""Which version a session's alias means: it keeps the version it began with. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_SESSIONS: Final = 100_000
"""Beyond this the least recently used sessions are forgotten. So many take about 30 MB."""


class Sessions:
    """Which version each session is pinned to.

    Args:
        ttl_s: a pin that was not used for so many seconds is dropped.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._pins: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Session -> its version, and when it was last used."""

    def __len__(self) -> int:
        """Number of pinned sessions."""
        return len(self._pins)

    def version(self, session: str, current: int, now: float) -> int:
        """The session's version; a new session is pinned to `current`.

        Args:
            session: named by the client.
            current: of the line.
            now: monotonic, seconds.
        """
        self._expire(now)
        version, _ = self._pins.pop(session, (current, now))
        self._pins[session] = version, now
        return version

    def _expire(self, now: float) -> None:
        while self._pins:  # in the order of their last use
            _, used_at_s = next(iter(self._pins.values()))
            if now - used_at_s <= self._ttl_s and len(self._pins) <= MAX_SESSIONS:
                return
            self._pins.popitem(last=False)
