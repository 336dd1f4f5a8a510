"""The probe: a tiny scored request. A smoke test of which weights answer, not a proof."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

PROBE_TOKENS: Final = (11, 87, 42, 151, 7, 203, 64, 128, 19, 230, 95, 176, 33, 222, 58, 140)
"""Token ids of the probe: the same on every replica, below every vocabulary's size, and short
enough for every context length."""


ZERO_INIT: Final = "zero_init"
"""Key in a manifest's metadata: true when the adapter is meant to change nothing yet (B = 0)."""
TRAINER_REFERENCE: Final = "probe_reference"
"""Key in a manifest's metadata: the trainer's own values for `PROBE_TOKENS`, one fewer."""


def notes_on(
    probe: Sequence[float],
    base: Sequence[float] | None,
    metadata: Mapping[str, Any],
    *,
    tolerance: float,
) -> tuple[str, ...]:
    """What is odd about a probe, and yet no reason to withhold the ack; pure.

    Args:
        probe: log-probabilities (natural log) under the version's name.
        base: those of the base model on the same engine build, if they could be taken.
        metadata: of the manifest; untrusted.
        tolerance: largest mean absolute difference to the trainer's reference. A bf16 server and
            the trainer differ by up to 0.03, two policies by 0.2 and more (vLLM 0.32, CPU).
    """
    notes = []
    if base is not None and not metadata.get(ZERO_INIT) and tuple(probe) == tuple(base):
        notes.append(
            "inconclusive: the probe equals the base model's exactly, so nothing shows that the "
            "adapter has an effect; if B = 0 is meant, say so with "
            f"{ZERO_INIT!r} in its metadata"
        )
    difference = _mean_difference(probe, metadata.get(TRAINER_REFERENCE))
    if difference is not None and not difference <= tolerance:
        notes.append(
            f"the probe differs from the trainer's reference by {difference:.3g} on average, "
            f"tolerated are {tolerance:g}"
        )
    return tuple(notes)


def _mean_difference(probe: Sequence[float], reference: object) -> float | None:
    """Mean absolute difference; None without a reference, infinite for one that does not fit."""
    if reference is None:
        return None
    if not isinstance(reference, list) or len(reference) != len(probe) or not probe:
        return float("inf")
    if not all(isinstance(value, (int, float)) for value in reference):
        return float("inf")
    return sum(abs(a - float(b)) for a, b in zip(probe, reference, strict=True)) / len(probe)


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
