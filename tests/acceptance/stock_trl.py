"""Stock AsyncGRPOTrainer of TRL, nothing of policyline in it: MODEL OUTPUT URL STEPS."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

STAND_IN = Path(__file__).parents[2] / "examples" / "cpu_stand_in.py"


def digits(completions: list[Any], **_: Any) -> list[float]:
    """Share of digits among the characters."""
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(ch.isdigit() for ch in text) / max(1, len(text)) for text in texts]


def train(kind: Any, model: str, output: str, url: str, steps: int, **more: Any) -> None:
    """Train with a trainer class; `more` are arguments of its own."""
    spec = importlib.util.spec_from_file_location("cpu_stand_in", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # two GPU-only calls
    questions = [f"What is {a} plus {b}?" for a in range(20) for b in range(20)]
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in questions])
    config = AsyncGRPOConfig(
        output_dir=output,
        vllm_server_base_url=url,
        max_steps=steps,
        max_staleness=4,
        weight_sync_steps=1,
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_completion_length=16,
        max_inflight_tasks=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        chat_template_kwargs={},
    )
    kind(
        model=model,
        args=config,
        train_dataset=prompts,
        reward_funcs=digits,
        peft_config=LoraConfig(r=1, lora_alpha=2, target_modules="all-linear"),
        **more,
    ).train()


if __name__ == "__main__":
    train(AsyncGRPOTrainer, sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
