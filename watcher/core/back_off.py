"""When a failed load, or a failed pass, is tried again; pure. Time and chance are arguments."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.2
"""Back-off before the second attempt; doubled for each further one."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """A version that could not be served yet."""

    attempts: int
    not_before_s: float
    cause: str


def next_delay_s(attempts: int, chance: float, cap_s: float) -> float:
    """Seconds to wait after the `attempts`-th failure in a row.

    Args:
        attempts: 1 or more.
        chance: from [0, 1); the delay is between half and all of the doubled base, so that
            replicas that failed together do not return together.
        cap_s: the longest delay.
    """
    doubled = FIRST_DELAY_S * 2.0 ** min(attempts - 1, 30)
    return min(cap_s, doubled) * (0.5 + chance / 2)


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """The circumstances of a failed attempt."""

    cause: str
    now: float
    """Monotonic, seconds."""
    chance: float
    """From [0, 1)."""
    cap_s: float
    """The longest back-off."""

    def retry_at_s(self, attempts: int) -> float:
        """When to try again after so many failures in a row."""
        return self.now + next_delay_s(attempts, self.chance, self.cap_s)
