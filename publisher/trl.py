"""TRL's asynchronous GRPO with policyline: two changed lines in a script.

    from policyline.publisher.trl import AsyncGRPOConfig, AsyncGRPOTrainer, PublishTo  # not TRL's
    ...
    trainer = AsyncGRPOTrainer(..., publish_to=PublishTo(ledger=..., storage=..., run=...))

At each weight sync the trainer saves the adapter and continues. Checks, hashing and upload run in a
thread next to the training step. Each server's sidecar then loads the version. Generation is never
paused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from policyline.publisher.errors import NotSupported
from policyline.publisher.settings import PublishTo
from policyline.publisher.training.gather import (
    Gathered,
    check_adapter,
    check_config,
    gather,
    peft_model_of,
)
from policyline.publisher.training.rank0 import Rank0Session
from policyline.publisher.training.ranks import on_rank_0
from policyline.publisher.training.trl_private import (
    GuardedQueue,
    NoTransfer,
    RolloutWorker,
    TrlConfig,
    TrlTrainer,
    direct_worker,
    require_supported,
    score,
)
from policyline.publisher.training.trl_worker import Endpoints, PolicyRolloutLoop

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "PublishTo"]

AsyncGRPOConfig = TrlConfig
"""TRL's own configuration, so that one line of a script imports both."""


class AsyncGRPOTrainer(TrlTrainer):
    """TRL's `AsyncGRPOTrainer`, which publishes a version at each weight sync.

    Training waits at the first sync until the version is served, and later while rollouts are more
    than `args.max_staleness` versions behind. If that takes longer than
    `publish_to.ready_timeout_s` seconds, `train` raises `NothingReady`, or `PublishingBlocked` when
    ledger or storage do not answer. Any other error of publishing ends it at the next sync.

    Args:
        args, kwargs: as TRL's. `peft_config` must be a LoRA; `weight_transfer` must not be given.
        publish_to: ledger, storage, run and bounds.

    Raises:
        NotSupported: the installed TRL release, a model without LoRA, or settings that exclude
            each other.
        CheckFailed: vLLM could not serve the adapter; names every reason.
    """

    def __init__(self, *args: Any, publish_to: PublishTo, **kwargs: Any) -> None:
        require_supported()
        if kwargs.get("weight_transfer") is not None:
            raise NotSupported(
                "weight_transfer and publish_to exclude each other",
                hint="leave weight_transfer out",
            )
        if kwargs.get("peft_config") is not None:
            check_config(kwargs["peft_config"])
        super().__init__(*args, **{**kwargs, "weight_transfer": NoTransfer()})
        self._publish_to = publish_to
        self._rank0: Rank0Session | None = None
        self._adapter = peft_model_of(self.model).active_adapters[0]
        base_model = str(self.model.config._name_or_path)  # noqa: SLF001 - transformers has no public name
        gathered = gather(peft_model_of(self.model), self._adapter)
        on_rank_0(lambda: check_adapter(gathered, base_model, publish_to.max_lora_rank))
        self._base_model = base_model
        one = self.accelerator.num_processes == 1
        self._probes = one if publish_to.probe_reference is None else publish_to.probe_reference
        if self.accelerator.is_main_process:
            self._direct()

    def _direct(self) -> None:
        """Send the worker's requests to the servers that serve the version."""
        buffer = self.rollout_worker.rollout_buffer
        self.rollout_queue = GuardedQueue(buffer, self._check, self._consumed)
        if isinstance(self.rollout_worker, RolloutWorker):
            to = self._publish_to
            endpoints = Endpoints(to.ledger, dict(to.servers)) if to.servers else None
            direct_worker(self.rollout_worker, to.line, PolicyRolloutLoop, {"endpoints": endpoints})

    def _check(self) -> None:
        if self._rank0 is not None:
            self._rank0.progress.check()

    def _consumed(self, version: int) -> None:
        if self._rank0 is not None:
            self._rank0.session.logs.consume(version)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        resumed = _resumed(kwargs.get("resume_from_checkpoint"))
        self._rank0 = on_rank_0(lambda: self._open(resumed))
        try:
            result = super()._inner_training_loop(*args, **kwargs)
            on_rank_0(self._finish)
        finally:
            if self._rank0 is not None:
                self._rank0.close()
            self._rank0 = None
        return result

    def _open(self, resumed: Mapping[str, Any]) -> Rank0Session:
        to = self._publish_to
        rank0 = Rank0Session(
            to,
            max_staleness=self.args.max_staleness,
            base_model=self._base_model,
            staging=to.staging or Path(self.args.output_dir) / ".policyline",
            resumed=resumed,
            on_published=self._set_published,
            on_current=self._set_current,
        )
        try:
            rank0.check_routing(str(self.args.vllm_server_base_url))
        except BaseException:
            rank0.close()
            raise
        return rank0

    def _finish(self) -> None:
        if self._rank0 is not None:
            self._rank0.submit()
            self._rank0.session.finish()

    def _set_published(self, version: int) -> None:
        """Set the version that TRL counts staleness from."""
        self.model_version = version

    def _set_current(self, version: int, served: bool) -> None:  # noqa: FBT001 - a callback
        """Set the version the rollout worker asks for; below zero it waits."""
        if isinstance(self.rollout_worker, RolloutWorker):
            self.rollout_worker.update_model_version(version if served else -version)
        elif served:
            self.rollout_worker.update_model_version(version)

    def _sync_weight(self) -> None:
        """Save the adapter and submit it; called by TRL on every rank."""
        started = time.perf_counter()
        on_rank_0(self._before_sync)
        waited = time.perf_counter()
        gathered = gather(peft_model_of(self.model), self._adapter)
        gathered_at = time.perf_counter()
        reference: Future[list[float]] | None = Future() if self._probes else None
        try:
            on_rank_0(lambda: self._save_version(gathered, gathered_at - waited, reference))
            if reference is not None:  # scored while the version is being published
                precision = self.compute_loss_context_manager()
                reference.set_result(score(peft_model_of(self.model), precision))
        finally:
            if reference is not None:
                reference.cancel()  # no effect on a result; else nobody waits for one
        on_rank_0(self._wait_first)
        ended = time.perf_counter()
        metrics = self._metrics["train"]
        metrics["perf/weight_sync_s"].append(ended - started)
        metrics["perf/weight_sync_pause_s"].append(0.0)
        metrics["perf/weight_sync_barrier_s"].append(waited - started)
        metrics["perf/weight_sync_transfer_s"].append(ended - waited)

    def _before_sync(self) -> None:
        if self._rank0 is not None:
            self._rank0.submit()
            self._rank0.before_sync()

    def _save_version(
        self, gathered: Gathered, gather_s: float, reference: Future[list[float]] | None
    ) -> None:
        assert self._rank0 is not None
        step = self.state.global_step
        self._rank0.session.save(gathered.save, {"step": step}, gather_s, reference)
        # transformers logs a step after its `on_step_end`: the log's values belong to this version
        if step == 0 or not self.control.should_log or self._rank0.is_first:
            self._rank0.submit()

    def _wait_first(self) -> None:
        if self._rank0 is not None and self._rank0.is_first:
            self._rank0.wait_first()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's; the logged values are recorded with the next version."""
        super().log(logs, start_time)
        if self._rank0 is not None:
            self._rank0.session.logs.add(logs)
            self._rank0.submit()


def _resumed(checkpoint: object) -> dict[str, Any]:
    """Version and step that a checkpoint continues from; empty without a checkpoint."""
    if not checkpoint:
        return {}
    found: dict[str, Any] = {}
    for file, key, name in (
        ("rollout_state.json", "model_version", "parent_version"),
        ("trainer_state.json", "global_step", "checkpoint_step"),
    ):
        try:
            found[name] = int(json.loads((Path(str(checkpoint)) / file).read_text())[key])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an older checkpoint; TRL reports that itself
    return found
