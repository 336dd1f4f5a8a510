"""Asynchronous GRPO over policyline: TRL's trainer with two lines changed (marked below).

    python examples/async_grpo.py --model Qwen/Qwen2.5-Math-1.5B --vllm http://127.0.0.1:8000 \
        --ledger run.db --storage /mnt/policies --run grpo-7
    python examples/async_grpo.py --profile tiny ...   # on a CPU; see `make train-demo`

Before it, a sidecar runs next to each vLLM server; see docs/quickstart-trl.md.
"""

from __future__ import annotations

import argparse
import logging
from importlib import import_module
from typing import Any

from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl.rewards import accuracy_reward

from policyline.publisher.trl import (  # line 1: was TRL's
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    PublishTo,
)

PROFILES: dict[str, dict[str, Any]] = {
    # one GPU for training, two or three servers with --max-loras 6
    "reference": {
        "learning_rate": 4e-5,
        "num_generations": 8,
        "max_staleness": 4,
        "weight_sync_steps": 4,
        "max_steps": 500,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 8,
    },
    # the model of policyline.demo.tiny_model: two layers, 400 tokens, random weights
    "tiny": {
        "learning_rate": 1e-2,
        "num_generations": 8,
        "max_staleness": 4,
        "weight_sync_steps": 1,
        "max_steps": 60,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 16,
        "max_inflight_tasks": 32,
        "queue_maxsize": 32,
        "token_budget": 0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "chat_template_kwargs": {},
    },
}


def digits(completions: list[Any], **_: Any) -> list[float]:
    """Share of digits among the characters: what a random model learns in minutes."""
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(ch.isdigit() for ch in text) / max(1, len(text)) for text in texts]


def sums() -> Dataset:
    """400 questions; needs no download."""
    questions = [f"What is {a} plus {b}?" for a in range(20) for b in range(20)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in questions])


def main() -> None:
    """Train."""
    given = _parser().parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("trl").setLevel(logging.WARNING)
    settings = dict(PROFILES[given.profile])
    if given.steps is not None:
        settings["max_steps"] = given.steps
    if given.profile == "tiny":
        import_module("cpu_stand_in")  # TRL's trainer wants a GPU
    args = AsyncGRPOConfig(
        output_dir=given.output,
        vllm_server_base_url=given.vllm,
        save_strategy="steps" if given.save_steps else "no",
        save_steps=given.save_steps or 500,
        report_to=[],
        **settings,
    )
    trainer = AsyncGRPOTrainer(
        model=given.model,
        args=args,
        reward_funcs=digits if given.profile == "tiny" else accuracy_reward,
        train_dataset=(
            sums()
            if given.profile == "tiny"
            else load_dataset("trl-lib/DeepMath-103K", split="train")
        ),
        peft_config=LoraConfig(r=1, lora_alpha=2, target_modules="all-linear"),
        publish_to=_publish_to(given),  # line 2: new
    )
    trainer.train(resume_from_checkpoint=given.resume)


def _publish_to(given: argparse.Namespace) -> PublishTo:
    return PublishTo(
        ledger=given.ledger,
        storage=given.storage,
        run=given.run,
        parent_run=given.parent_run,
        take_over=given.take_over,
        servers=dict(pair.split("=", 1) for pair in given.server),
        ready_timeout_s=given.ready_timeout,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Asynchronous GRPO over policyline.")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="reference")
    parser.add_argument("--model", default="Qwen/Qwen2.5-Math-1.5B")
    parser.add_argument("--vllm", required=True, help="the router, or the only server")
    parser.add_argument("--server", action="append", default=[], metavar="REPLICA=URL")
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--parent-run", default=None)
    parser.add_argument("--take-over", action="store_true")
    parser.add_argument("--ready-timeout", type=float, default=300.0)
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--save-steps", type=int, default=None)
    parser.add_argument("--resume", default=None, metavar="CHECKPOINT")
    return parser


if __name__ == "__main__":
    main()
