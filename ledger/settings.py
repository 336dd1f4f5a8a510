"""Rules of a run, chosen when it is opened and recorded in `run_opened`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from policyline.setting import SHORTEST_S, Setting, check_bounds, seconds

MOST: Final = 1_000_000
"""Of anything here, seconds included: eleven days. What is larger is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How stale a rollout may be, and when a version counts as ready."""

    max_staleness: Annotated[
        int,
        Setting(
            "--max-staleness",
            "Versions before current that stay served; a server needs --max-loras of 2 more.",
            "versions",
            minimum=0,
            maximum=MOST,
        ),
    ] = 4
    """TRL's option of the same name."""
    min_ready: Annotated[
        int | None,
        Setting(
            "--min-ready",
            "Replicas that must ack before the grace counts: a number, or all.",
            "replicas",
            minimum=1,
            maximum=MOST,
            none="all",
        ),
    ] = 1
    """None means all live replicas."""
    ready_grace_s: Annotated[
        float,
        seconds(
            "--ready-grace",
            "How long slower replicas are waited for after the first ack.",
            minimum=0,
            maximum=MOST,
        ),
    ] = 5.0
    candidate_timeout_s: Annotated[
        float,
        seconds(
            "--candidate-timeout",
            "A candidate that is not ready after so long is withdrawn.",
            minimum=SHORTEST_S,
            maximum=MOST,
        ),
    ] = 120.0
    """A cold engine compiles for about 20 s at its first request, so two minutes means that
    something is wrong."""

    def __post_init__(self) -> None:
        check_bounds(self)
