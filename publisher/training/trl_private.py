"""All of TRL's private parts that are used here, and the releases that have them.

Checked in TRL 1.14.0 to 1.16.0, trl/experimental/async_grpo: `AsyncGRPOTrainer` calls
`_sync_weight()` once on train begin and then every `weight_sync_steps` steps, before the step is
logged; it compares each sample's `model_version` with its own; it takes samples from
`rollout_queue`. `AsyncRolloutWorker` starts `_loop_cls(**_loop_kwargs, ...)` in a child process,
whose requests name `{lora_name}-v{model_version}` and go through `_post`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version as installed_version
from typing import Any, Final

import torch
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from policyline.ledger.probe import PROBE_TOKENS
from policyline.publisher.errors import NotSupported

TrlConfig: Final = AsyncGRPOConfig
TrlTrainer: Final = AsyncGRPOTrainer
RolloutWorker: Final = AsyncRolloutWorker
RolloutLoop: Final = _AsyncRolloutLoop

FIRST: Final = (1, 14)
LAST: Final = (1, 16)

_NEEDED: Final[Sequence[tuple[type, str, tuple[str, ...]]]] = (
    (AsyncGRPOTrainer, "__init__", ("weight_transfer", "args")),
    (AsyncGRPOTrainer, "_sync_weight", ("self",)),
    (AsyncGRPOTrainer, "_inner_training_loop", ("self", "args", "kwargs")),
    (AsyncGRPOTrainer, "log", ("self", "logs", "start_time")),
    (_AsyncRolloutLoop, "_post", ("self", "path", "payload", "timeout", "max_retries")),
    (_AsyncRolloutLoop, "_retry", ("self", "coro_factory", "label", "max_attempts")),
)


def require_supported(found: str | None = None) -> None:
    """Refuse a TRL release that this was not tested with.

    Args:
        found: TRL's version; None takes the installed one.

    Raises:
        NotSupported: another release, or one whose private parts have changed.
    """
    found = found or installed_version("trl")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not FIRST <= release <= LAST:
        raise NotSupported(
            f"TRL {found} is installed; this integration works with {_shown(FIRST)} to "
            f"{_shown(LAST)}, whose private parts it uses",
            hint=f"pip install 'trl>={_shown(FIRST)},<{_shown((LAST[0], LAST[1] + 1))}', or "
            "publish with policyline.publisher.callback.PublishCallback, which needs none of them",
        )
    changed = sorted(_changes())
    if changed:
        raise NotSupported(
            f"TRL {found} is not as it was released: {', '.join(changed)}",
            hint="reinstall it from the package index",
        )


def _shown(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _changes() -> list[str]:
    changes = []
    for owner, name, parameters in _NEEDED:
        member = getattr(owner, name, None)
        present = () if member is None else tuple(inspect.signature(member).parameters)
        if not set(parameters) <= set(present):
            changes.append(f"{owner.__name__}.{name}")
    if not hasattr(AsyncRolloutWorker, "_loop_cls"):
        changes.append("AsyncRolloutWorker._loop_cls")
    return changes


class NoTransfer:
    """`WeightTransferProtocol` of TRL: nothing is sent to a server by the trainer."""

    def init_weight_transfer(self) -> None:
        """Nothing."""

    def pause(self) -> None:
        """Nothing: generation goes on."""

    def send_weights(self, iterator: Any) -> None:
        """Nothing."""

    def resume(self) -> None:
        """Nothing."""

    def destroy(self) -> None:
        """Nothing."""


class GuardedQueue:
    """The rollout queue for the trainer: calls `guard` before each get, `consumed` after it."""

    def __init__(
        self, queue: Any, guard: Callable[[], None], consumed: Callable[[int], None]
    ) -> None:
        self._queue = queue
        self._guard = guard
        self._consumed = consumed

    def get(self, timeout: float | None = None) -> Any:
        """One sample; raises what `guard` raises, and `queue.Empty`."""
        self._guard()
        sample = self._queue.get(timeout=timeout)
        self._consumed(int(sample.model_version))
        return sample

    def qsize(self) -> int:
        """How many samples wait."""
        return int(self._queue.qsize())


def direct_worker(worker: Any, line: str, loop: type, more: Mapping[str, Any]) -> None:
    """Make TRL's own worker, not started yet, name versions of `line` and run `loop`.

    Args:
        worker: an `AsyncRolloutWorker`.
        line: prefix of the versions' names.
        loop: subclass of `RolloutLoop`, at module level, since the child process imports it.
        more: its additional keyword arguments; must be picklable.
    """
    worker._loop_cls = loop  # noqa: SLF001 - this module is where that is done
    worker._loop_kwargs.update({"lora_name": line, **more})  # noqa: SLF001 - as above


def score(model: Any, precision: AbstractContextManager[Any]) -> list[float]:
    """The trainer's own answer to the probe, for the replicas to compare theirs with.

    One forward pass over 16 tokens, without gradients and without dropout.

    Args:
        model: a causal language model; its training mode is restored.
        precision: context of the forward pass, as in training (autocast).

    Returns:
        15 log-probabilities (natural log), one for each of `PROBE_TOKENS` but the first.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), precision:
            logits = model(**_probe_inputs(model), use_cache=False).logits[0]
    finally:
        model.train(training)
    scores = torch.log_softmax(logits.float(), dim=-1)
    wanted = torch.tensor(PROBE_TOKENS[1:], device=scores.device)
    return [float(s) for s in scores[:-1].gather(1, wanted[:, None])[:, 0]]


def _probe_inputs(model: Any) -> dict[str, Any]:
    """What a forward pass over one plain sequence takes in the trainer's model.

    From 1.16 on the attention is TRL's own (packing.py, `tree_attention`), which needs
    to know that the sequence is one branch. Before, the position ids show it.
    """
    count = len(PROBE_TOKENS)
    device = model.device
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([PROBE_TOKENS], device=device),
        "position_ids": torch.arange(count, device=device)[None],
    }
    if model.config._attn_implementation == "tree_fa3":  # noqa: SLF001 - transformers has no other
        ends = torch.tensor([0, count], dtype=torch.int32, device=device)
        inputs |= {
            "tree_kv_index": torch.arange(count, device=device),
            "tree_cu_seqlens_q": ends,
            "tree_cu_seqlens_k": ends,
            "tree_max_seqlen_q": count,
            "tree_max_seqlen_k": count,
        }
    return inputs
