"""Publishing from any trainer of transformers that trains a PEFT adapter: SFT, DPO, GRPO, ...

    trainer = SFTTrainer(..., callbacks=[PublishCallback(PublishTo(ledger=..., ...))])

Training does not wait until a version is served. A trainer that generates its own rollouts on the
servers needs `policyline.publisher.trl` instead.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from policyline.publisher.settings import PublishTo
from policyline.publisher.training.gather import Gathered, check_adapter, gather, peft_model_of
from policyline.publisher.training.ranks import on_rank_0
from policyline.publisher.training.session import Session


class PublishCallback(TrainerCallback):
    """Publishes the trained adapter every N steps, or whenever the trainer saves.

    The adapter is saved at the end of a step; everything else happens in a thread of its own while
    training continues. At the end of training the last version is waited for, for at most
    `PublishTo.ready_timeout_s` seconds. Works on every rank of a distributed trainer; rank 0
    publishes.

    An error of publishing stops training at the next version, or at the end: `CheckFailed`,
    `StaleEpoch`, `StorageError`, ... A ledger or storage that does not answer stops it only at the
    end, with `PublishingBlocked`.

    Args:
        to: ledger, storage and run. `servers` and `probe_reference` are not used.
        every_n_steps: publish every so many optimizer steps; None publishes at each save.
        max_staleness: how many versions, besides the current one, stay served; a rule of the run
            if this opens it.

    Raises:
        CheckFailed: when training begins: vLLM could not serve the adapter.
        NotSupported: when training begins: the model has no LoRA, or the run was opened with
            another `max_staleness`.
    """

    def __init__(
        self,
        to: PublishTo,
        *,
        every_n_steps: int | None = None,
        max_staleness: int = 4,
    ) -> None:
        self._to = to
        self._every_n_steps = every_n_steps
        self._max_staleness = max_staleness
        self._session: Session | None = None

    def on_train_begin(self, args: Any, state: Any, _control: Any, **given: Any) -> None:
        """Check the adapter and open the run; called by the trainer."""
        model = peft_model_of(given["model"])
        gathered = gather(model, model.active_adapters[0])
        base_model = str(model.config._name_or_path)  # noqa: SLF001 - transformers has no public name
        resumed = {"checkpoint_step": state.global_step} if state.global_step else {}

        def open_session() -> Session:
            check_adapter(gathered, base_model, self._to.max_lora_rank)
            return Session(
                self._to,
                max_staleness=self._max_staleness,
                base_model=base_model,
                staging=self._to.staging or Path(args.output_dir) / ".policyline",
                resumed=resumed,
            )

        self._session = on_rank_0(open_session)

    def on_step_end(self, _args: Any, state: Any, control: Any, **given: Any) -> None:
        """Every N steps: save the adapter now, publish it once the step is logged."""
        if self._every_n_steps is not None and state.global_step % self._every_n_steps == 0:
            self._sync(given["model"], state.global_step, wait_for_log=control.should_log)

    def on_log(self, _args: Any, _state: Any, _control: Any, **given: Any) -> None:
        """Record what the trainer logs with the next version."""
        if self._session is not None:
            self._session.logs.add(given["logs"])
            self._submit()

    def on_save(self, _args: Any, state: Any, _control: Any, **given: Any) -> None:
        """Without `every_n_steps`: publish, since a save comes after the step's log."""
        if self._every_n_steps is None:
            self._sync(given["model"], state.global_step, wait_for_log=False)

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_given: Any) -> None:
        """Publish what is left, wait for it, and release the epoch."""
        try:
            on_rank_0(self._finish)
        finally:
            self.close()

    def close(self) -> None:
        """End publishing. Call it when `train` raised and the process goes on. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _sync(self, model: Any, step: int, *, wait_for_log: bool) -> None:
        peft_model = peft_model_of(model)
        on_rank_0(self._before_sync)
        begun = time.perf_counter()
        gathered = gather(peft_model, peft_model.active_adapters[0])
        gather_s = time.perf_counter() - begun
        on_rank_0(lambda: self._save(gathered, step, gather_s))
        if not wait_for_log:
            self._submit()

    def _before_sync(self) -> None:
        assert self._session is not None
        self._submit()
        self._session.raise_failure()

    def _save(self, gathered: Gathered, step: int, gather_s: float) -> None:
        assert self._session is not None
        self._session.save(gathered.save, {"step": step}, gather_s)

    def _submit(self) -> None:
        if self._session is not None:
            self._session.submit()

    def _finish(self) -> None:
        if self._session is not None:
            self._submit()
            self._session.finish()
