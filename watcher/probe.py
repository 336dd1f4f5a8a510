"""The probe: a tiny scored request. A smoke test of which weights answer, not a proof."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

PROBE_TOKENS: Final = (11, 87, 42, 151, 7, 203, 64, 128, 19, 230, 95, 176, 33, 222, 58, 140)
"""Token ids of the probe: the same on every replica, below every vocabulary's size, and short
enough for every context length."""


def largest_difference(probe: Sequence[float], reference: str) -> float:
    """Largest absolute difference (natural log) between a probe and a recorded one.

    Args:
        probe: log-probabilities of the probe's tokens.
        reference: JSON list of the same, as the ledger keeps it. One of another length, from a
            release with another probe, differs infinitely.
    """
    values = json.loads(reference)
    if len(values) != len(probe):
        return float("inf")
    return max((abs(a - b) for a, b in zip(probe, values, strict=True)), default=0.0)
