"""Sessions: an episode that asks for the alias keeps its version. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MOST_SESSIONS: Final = 100_000
"""Beyond that the ones unused for longest are forgotten: about 30 MB."""


@dataclass(slots=True)
class _Pin:
    version: int
    used_at_s: float


class Sessions:
    """Which version each session is pinned to.

    Args:
        ttl_s: a pin that was not used for so long is gone.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._pins: OrderedDict[str, _Pin] = OrderedDict()

    def __len__(self) -> int:
        """How many pins there are."""
        return len(self._pins)

    def version(self, session: str, current: int, now: float) -> int:
        """The session's version: the one it began with, else `current` from now on.

        Args:
            session: named by the client.
            current: of the line.
            now: monotonic, seconds.
        """
        self._expire(now)
        pin = self._pins.get(session)
        if pin is None:
            pin = self._pins[session] = _Pin(current, now)
        pin.used_at_s = now
        self._pins.move_to_end(session)
        return pin.version

    def _expire(self, now: float) -> None:
        """Pins lie in the order of their last use."""
        while self._pins:
            oldest = next(iter(self._pins.values()))
            if now - oldest.used_at_s <= self._ttl_s and len(self._pins) <= MOST_SESSIONS:
                return
            self._pins.popitem(last=False)
