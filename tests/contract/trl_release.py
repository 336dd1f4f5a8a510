"""Run as a program with one TRL release on the path: what publisher.trl relies on, exercised.

    python tests/contract/trl_release.py MODEL

Prints one JSON object of what was seen; the test judges it.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import tempfile
from importlib import import_module
from typing import Any, Self

import numpy as np
import trl
from datasets import Dataset
from peft import LoraConfig
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from policyline.publisher.training.trl_private import (
    GuardedQueue,
    NoTransfer,
    TrlConfig,
    TrlTrainer,
    direct_worker,
    require_supported,
)
from policyline.publisher.training.trl_worker import PolicyRolloutLoop

STALE, FRESH = 1, 6
"""Versions of the samples, where the trainer is at 7 and tolerates 4."""


def sample(version: int) -> RolloutSample:
    """One rollout of 8 tokens, of which 4 are trained."""
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.arange(5, 13),
        completion_mask=np.array([0, 0, 0, 0, 1, 1, 1, 1]),
        old_log_probs=np.full(8, -5.0, dtype=np.float32),
        advantage=1.0,
        model_version=version,
        group_id=0,
        metrics={"reward": 1.0},
    )


class Worker:
    """A rollout worker that has everything ready."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.started_after = -1

    def start(self) -> None:
        """TRL starts it after the first sync."""
        self.started_after = len(SEEN["syncs"])

    def stop(self) -> None:
        """Nothing runs."""

    def update_model_version(self, version: int) -> None:
        """Nobody asks."""

    def check_health(self, stale_after_s: float) -> None:
        """Always well."""


SEEN: dict[str, Any] = {"syncs": [], "logged": [], "consumed": [], "should_log": []}


class Trainer(TrlTrainer):
    """Notes when it is asked to sync, and when it logs."""

    def _sync_weight(self) -> None:
        SEEN["syncs"].append(self.state.global_step)
        SEEN["should_log"].append(bool(self.control.should_log))
        self.model_version = 7

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "ratio" in logs:
            SEEN["logged"].append([self.state.global_step, len(SEEN["syncs"]), sorted(logs)])


def train(model: str) -> None:
    """Two steps, with samples of which some are too old."""
    worker = Worker()
    for version in (FRESH, STALE, FRESH, FRESH, FRESH, FRESH, FRESH):
        worker.rollout_buffer.put(sample(version))
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=model,
            args=TrlConfig(
                output_dir=output,
                max_steps=2,
                per_device_train_batch_size=2,
                token_budget=0,
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "1"}]}]),
            reward_funcs=[],
            peft_config=LoraConfig(r=1, lora_alpha=2, target_modules="all-linear"),
            rollout_worker=worker,
            weight_transfer=NoTransfer(),
        )
        trainer.rollout_queue = GuardedQueue(
            worker.rollout_buffer, lambda: None, SEEN["consumed"].append
        )
        trainer.train()
        SEEN["started_after"] = worker.started_after
        SEEN["tokenizer"] = trainer.processing_class


def ask() -> None:
    """One turn of the loop, with a session that answers by itself."""
    worker = AsyncRolloutWorker(model_name="m", vllm_server_url="http://nowhere")
    direct_worker(worker, "line", PolicyRolloutLoop, {"endpoints": None})
    SEEN["loop_kwargs"] = sorted(worker._loop_kwargs)
    SEEN["loop_cls"] = worker._loop_cls.__name__
    worker.update_model_version(-8)
    kwargs = {
        **worker._loop_kwargs,
        "dataset": Dataset.from_list([{"prompt": []}]),
        "reward_funcs": [len],
        "processing_class": SEEN.pop("tokenizer"),
        "rollout_buffer": worker.rollout_buffer,
        "model_version_value": worker._model_version_value,
        "heartbeat_value": worker._heartbeat_value,
        "failed_event": worker._failed_event,
        "exception_info_queue": worker._exception_info_queue,
        "metrics_queue": worker.metrics_queue,
    }
    if trl.__version__ >= "1.15":
        kwargs["eos_token_ids"] = [0]
    loop = PolicyRolloutLoop(**kwargs)
    SEEN["stamped"] = loop.model_version
    loop.session = Session()

    async def turn() -> None:
        asked = asyncio.create_task(loop._generate_one_turn([1, 2]))
        await asyncio.sleep(0.2)
        SEEN["waits_while_unserved"] = not asked.done()
        worker.update_model_version(9)
        SEEN["turn"] = await asked

    asyncio.run(turn())


class Session:
    """Answers like vLLM."""

    def post(self, url: str, json: dict[str, Any], timeout: Any) -> Answer:
        """Remember what was asked."""
        SEEN["asked"] = [url, json["model"]]
        return Answer()


class Answer:
    """A completion of one token."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def raise_for_status(self) -> None:
        """It is a good one."""

    async def json(self) -> dict[str, Any]:
        """Its body."""
        return {"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [-1.0]}}]}


if __name__ == "__main__":
    require_supported()
    import_module("examples.cpu_stand_in")
    train(sys.argv[1])
    ask()
    print(f"SEEN {json.dumps({**SEEN, 'version': trl.__version__})}")
