"""Merges a trainer's logs of the steps that led to a version. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, Final

_RECORDED: Final[Mapping[str, tuple[str, Callable[[Sequence[float]], float]]]] = {
    "loss": ("loss", fmean),
    "learning_rate": ("learning_rate", itemgetter(-1)),
    "grad_norm": ("grad_norm", fmean),
    "reward": ("reward", fmean),
    "reward_std": ("reward_std", fmean),
    "rewards/chosen": ("reward_chosen", fmean),
    "rewards/rejected": ("reward_rejected", fmean),
    "ratio": ("ratio", fmean),
    "kl": ("kl", fmean),
    "entropy": ("entropy", fmean),
    "sample/staleness_mean": ("staleness_mean", fmean),
    "sample/staleness_max": ("staleness_max", max),
    "sample/dropped_stale_total": ("dropped_stale", math.fsum),
    "perf/step_s": ("step_s", fmean),
    "perf/rollout_wait_s": ("rollout_wait_s", fmean),
}
"""Key in the logs of transformers' and TRL's trainers -> key in a version's metadata, and how the
values of several steps become one. Staleness is in versions, `_s` in seconds."""


class StepLogs:
    """Collects logs from one version to the next."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)
        self._samples: Counter[int] = Counter()

    def add(self, logs: Mapping[str, Any]) -> None:
        """Add one line of the trainer's log. What is not a finite number is left out."""
        for key, (name, _) in _RECORDED.items():
            value = logs.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                self._values[name].append(float(value))

    def consume(self, version: int) -> None:
        """Count a sample that `version` generated and training took."""
        self._samples[version] += 1

    def take(self) -> dict[str, Any]:
        """Metadata of the version that these steps have led to; starts again from nothing."""
        merge = dict(_RECORDED.values())
        known: dict[str, Any] = {name: merge[name](v) for name, v in self._values.items()}
        if self._samples:
            known["samples"] = {str(v): n for v, n in sorted(self._samples.items())}
        self._values.clear()
        self._samples.clear()
        return known


def ratio_flag(ratio: object, tolerance: float, after: str) -> str | None:
    """A flag for a mean importance ratio that is too far from 1; None when it is near enough.

    Args:
        ratio: mean over the steps since the version before; no flag when it is not a number.
        tolerance: largest distance from 1 that is not flagged.
        after: name of the version before.
    """
    if not isinstance(ratio, float) or abs(ratio - 1.0) <= tolerance:
        return None
    return f"ratio {ratio:.4f} after {after}"
