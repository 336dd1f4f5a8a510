"""How a trainer behind the router is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.settings import RunSettings
from policyline.setting import Setting, check_bounds, seconds


class LoadReturns(StrEnum):
    """When a trainer's load returns."""

    READY = "ready"
    """Once its version is current."""
    COMMITTED = "committed"
    """Once its version is published."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How trainers' loads are answered."""

    line: str = DEFAULT_LINE
    run: RunSettings = field(default_factory=RunSettings)
    """Rules of the runs that are opened here."""
    returns: Annotated[
        LoadReturns,
        Setting(
            "--load-returns",
            "A trainer's load returns when its version is current, or when it is published.",
        ),
    ] = LoadReturns.READY
    """TRL names a version from the moment its load returns; a request for one that is not ready
    waits."""
    ready_wait_s: Annotated[
        float,
        seconds(
            "--load-wait",
            "Longest wait of a load for ready; then the load returns and requests wait.",
            minimum=0,
        ),
    ] = 120.0
    follow_after_s: Annotated[
        float,
        seconds(
            "--follow-after",
            "A load that opens a run ends the line's run before it, and is refused while that one "
            "is held and has published within so long.",
            minimum=0,
        ),
    ] = 60.0
    """A URL with a wrong run in it must not end a training."""
    forward_pause: Annotated[
        bool,
        Setting(
            "--forward-pause",
            "Pause the whole fleet while a trainer does; needs --load-returns committed.",
        ),
    ] = False
    """Whether a trainer's pause becomes the ledger's desired state. A paused fleet loads nothing,
    so a load then returns when it is committed."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def waits(self) -> bool:
        """Whether a load waits until its version is current."""
        return self.returns == LoadReturns.READY and not self.forward_pause
