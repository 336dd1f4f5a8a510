"""The probe: a tiny scored request. A smoke test of which weights answer, not a proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policyline.ledger.probe import TRAINER_REFERENCE, ZERO_INIT


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
