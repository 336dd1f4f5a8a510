"""Rules of a run, chosen when it is opened and recorded in `run_opened`."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.errors import Refused


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
        if self.max_staleness < 0:
            raise Refused(f"max_staleness {self.max_staleness} is negative", hint="use 0 or more")
        if self.min_ready is not None and self.min_ready < 1:
            raise Refused(f"min_ready {self.min_ready} is below 1", hint="use 1 or more, or all")
        if self.ready_grace_s < 0 or self.candidate_timeout_s <= 0:
            raise Refused("ready_grace_s and candidate_timeout_s must not be negative")
