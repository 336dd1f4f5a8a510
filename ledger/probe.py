"""What trainer, watcher and ledger agree on about the probe: tokens, keys in metadata, likeness."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

PROBE_TOKENS: Final = (11, 87, 42, 151, 7, 203, 64, 128, 19, 230, 95, 176, 33, 222, 58, 140)
"""Token ids of the probe: the same on every replica, below every vocabulary's size, and short
enough for every context length."""
PROBE_TOLERANCE: Final = 1e-3
"""Largest difference (natural log) between two probes of one version on one engine build. Two CPU
servers of one build differ by 0.0, neighbouring versions by 0.4."""
ZERO_INIT: Final = "zero_init"
"""Key in a manifest's metadata: true when the adapter is meant to change nothing yet (B = 0)."""
TRAINER_REFERENCE: Final = "probe_reference"
"""Key in a manifest's metadata: the trainer's own values for `PROBE_TOKENS`, one fewer."""


def largest_difference(probe: Sequence[float], reference: str) -> float:
    """Largest absolute difference (natural log) between a probe and a recorded one.

    Args:
        probe: log-probabilities of the probe's tokens.
        reference: JSON list of the same, as the ledger stores it. One of another length, from a
            release with another probe, differs infinitely.
    """
    values = json.loads(reference)
    if len(values) != len(probe):
        return float("inf")
    return max((abs(a - b) for a, b in zip(probe, values, strict=True)), default=0.0)
