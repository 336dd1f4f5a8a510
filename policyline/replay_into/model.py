"""The results of a replay, and how a probe is compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from policyline.ledger.probe import largest_difference

Outcome = Literal[
    "agrees", "differs", "other_build", "unrecorded", "refused_again", "failed", "collected"
]
"""The result of one version:

- `agrees`, `differs`: from the probe that was recorded on this build of the engine
- `other_build`: there is only a probe of another build; the difference is shown, not judged
- `unrecorded`: no replica ever acked it with this probe, so there is nothing to compare with
- `refused_again`: the engine refuses it, and the ledger has recorded the same
- `failed`: its bytes are not the published ones, or the engine does not serve it
- `collected`: its bytes were deleted on purpose
"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One probe in the ledger."""

    replica: str
    build: str
    probe: str
    """JSON list of log-probabilities (natural log)."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one version, with its figures."""

    version: int
    name: str
    digest: str
    outcome: Outcome
    reason: str = ""
    """Why, where it failed or was refused."""
    difference: float | None = None
    """Largest absolute difference of log-probabilities (natural log); None when not compared."""
    replica: str | None = None
    """The replica that recorded the probe it was compared with."""
    build: str | None = None
    """The build of the engine that answered that probe."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of `fetch`, `verify`, `load` and `probe`, as far as they were done."""

    @property
    def is_bad(self) -> bool:
        """Whether it makes the replay fail."""
        return self.outcome in {"differs", "failed"}


def judge(
    probe: Sequence[float], recorded: Sequence[Recorded], build: str, tolerance: float
) -> tuple[Outcome, float | None, Recorded | None]:
    """Compare with the first probe of the same build, else with the first of any other.

    Args:
        probe: log-probabilities (natural log), as answered now.
        recorded: of the same digest, in the order of the acks; those of another length, from a
            release with another probe, cannot be compared.
        build: of the engine that answered.
        tolerance: largest difference (natural log) that counts as the same on the same build.

    Returns:
        The outcome, the largest absolute difference (natural log), and what was compared with.
    """
    comparable = [r for r in recorded if largest_difference(probe, r.probe) != math.inf]
    same = next((r for r in comparable if r.build == build), None)
    reference = same or next(iter(comparable), None)
    if reference is None:
        return "unrecorded", None, None
    difference = largest_difference(probe, reference.probe)
    if same is None:
        return "other_build", difference, reference
    return "agrees" if difference <= tolerance else "differs", difference, reference
