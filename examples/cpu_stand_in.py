"""Lets TRL's AsyncGRPOTrainer train a tiny model on a CPU; import it before the trainer is made.

TRL needs a GPU for few things: the name of the device, to estimate its speed, attention over
packed sequences from the `kernels` package, and in 1.15 the output layer. For a demo and for tests;
far too slow for more.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo import async_grpo_trainer as trainer_module

PACKED = "cpu_packed"
"""Attention for TRL below 1.16, where position ids separate the sequences."""


def _one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Causal attention of one sequence, the mask aligned to the lower right.

    Args:
        query: shape (tokens, heads, head size).
        key: shape (tokens so far, key heads, head size); a multiple of heads shares each.
        value: as `key`.
        scale: of the scores; None takes torch's.
    """
    rows, columns = len(query), len(key)
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    answer = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return answer[0].transpose(0, 1)


class _Varlen:
    """The one function of the flash attention kernels that TRL 1.16 calls."""

    @staticmethod
    def flash_attn_varlen_func(  # noqa: PLR0917 - the kernel's order
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,  # noqa: ARG004 - the kernel's name
        max_k: int,  # noqa: ARG004 - the kernel's name
        softmax_scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attention of each sequence by itself."""
        ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
        spans = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
        return torch.cat([_one(q[a:b], k[c:d], v[c:d], softmax_scale) for a, b, c, d in spans])


def _packed(  # noqa: PLR0917 - transformers' order
    module: Any,  # noqa: ARG001 - transformers' name
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,  # noqa: ARG001 - transformers' name
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert position_ids is not None
    q, k, v = (t.transpose(1, 2)[0] for t in (query, key, value))
    starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    spans = zip(starts, [*starts[1:], len(q)], strict=True)
    return torch.cat([_one(q[a:b], k[a:b], v[a:b], scaling) for a, b in spans])[None], None


class _Head:
    """Log-probability and entropy of each token, where TRL 1.15 has a Triton kernel alone."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        *_: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """As the kernel's autograd function; what is not asked for is None."""
        scores = (functional.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
        chosen = scores.gather(1, targets[:, None])[:, 0]
        return chosen, -(scores.exp() * scores).sum(-1), None, None, None


def install() -> None:
    """Put the stand-ins in place. Idempotent."""
    torch.cuda.get_device_name = lambda *_args, **_kwargs: "cpu"
    try:
        packing = import_module("trl.experimental.async_grpo.packing")
    except ModuleNotFoundError:
        _install_packed()
    else:
        vars(packing)["_flash_attn"] = lambda: _Varlen


def _install_packed() -> None:
    """TRL 1.14 and 1.15 name a kernel that is made for GPUs when they load the model."""
    utils = import_module("trl.trainer.utils")
    if hasattr(utils, "add_fused_lm_head"):  # 1.15
        vars(utils)["_ChunkedLogProbFunction"] = _Head
    AttentionInterface.register(PACKED, _packed)
    AttentionMaskInterface.register(PACKED, lambda **_: None)
    original = trainer_module.create_model_from_path
    if inspect.getmodule(original) is inspect.getmodule(_install_packed):
        return

    def create(model: str, **kwargs: Any) -> Any:
        return original(model, **{**kwargs, "attn_implementation": PACKED})

    trainer_module.create_model_from_path = create


install()
