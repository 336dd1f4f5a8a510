"""The trainer's own answer to the probe, for the replicas to compare theirs with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from policyline.ledger.probe import PROBE_TOKENS


def score(
    model: Any, inputs: Mapping[str, Any], precision: AbstractContextManager[Any]
) -> list[float]:
    """Log-probabilities (natural log) of `PROBE_TOKENS[1:]` under the model as it is.

    One forward pass over 16 tokens, without gradients and without dropout.

    Returns:
        15 values, one for each token but the first.


    Args:
        model: a causal language model; its training mode is restored.
        inputs: of its forward for the probe's tokens; logits of shape (1, 16, vocabulary).
        precision: context of the forward pass, as in training (autocast).
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision:
            logits = model(**inputs, use_cache=False).logits[0]
    finally:
        model.train(training)
    scores = torch.log_softmax(logits.float(), dim=-1)
    wanted = torch.tensor(PROBE_TOKENS[1:], device=scores.device)
    return [float(s) for s in scores[:-1].gather(1, wanted[:, None])[:, 0]]
