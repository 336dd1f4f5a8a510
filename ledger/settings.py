"""Rules of a run, chosen when it is opened and recorded in `run_opened`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from policyline.ledger.errors import Refused

MOST: Final = 1_000_000
"""Of anything here, seconds included: eleven days. What is larger is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How stale a rollout may be, and when a version counts as ready."""

    max_staleness: int = 4
    """How many versions before current stay served; TRL's option of the same name."""
    min_ready: int | None = 1
    """Replicas that must ack before the grace counts; None means all live replicas."""
    ready_grace_s: float = 5.0
    """Seconds after the first ack for which slower replicas are waited for."""
    candidate_timeout_s: float = 120.0
    """Seconds after which a candidate that is not ready is withdrawn. A cold engine compiles for
    about 20 s at its first request, so two minutes means that something is wrong."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_staleness <= MOST:
            raise Refused(f"max_staleness {self.max_staleness} is not in 0 to {MOST}")
        if self.min_ready is not None and not 1 <= self.min_ready <= MOST:
            raise Refused(f"min_ready {self.min_ready} is not in 1 to {MOST}", hint="or use all")
        if not 0 <= self.ready_grace_s <= MOST or not 0 < self.candidate_timeout_s <= MOST:
            raise Refused(
                f"ready_grace_s {self.ready_grace_s} or candidate_timeout_s "
                f"{self.candidate_timeout_s} is not in 0 to {MOST}"
            )
