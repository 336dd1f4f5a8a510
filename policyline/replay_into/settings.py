"""Settings of one replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from policyline.ledger.probe import PROBE_TOLERANCE
from policyline.replay_into.records import Range
from policyline.setting import Setting, check_bounds, seconds
from policyline.watcher.settings import MAX_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is replayed, and how."""

    run: str
    versions: Range = field(default_factory=Range)
    tolerance: Annotated[
        float,
        Setting(
            "--tolerance",
            "With --into: largest difference of log-probabilities on the same engine build.",
            "nats",
            minimum=0,
            variable="POLICYLINE_REPLAY_TOLERANCE",
        ),
    ] = PROBE_TOLERANCE
    max_size_bytes: Annotated[
        int,
        Setting(
            "--max-size",
            "With --into: a version whose manifest claims more is not copied.",
            "bytes",
            minimum=1,
            variable="POLICYLINE_MAX_SIZE",
        ),
    ] = MAX_SIZE_BYTES
    engine_back_s: Annotated[
        float,
        seconds(
            "--restart-wait",
            "With --into: how long a server that stopped answering is waited for.",
            variable="POLICYLINE_REPLAY_RESTART_WAIT",
            minimum=0,
        ),
    ] = 300.0
    """A restart takes a minute or two."""

    def __post_init__(self) -> None:
        check_bounds(self)
