"""stock_trl.py with policyline: MODEL OUTPUT STEPS SAMPLES LEDGER STORAGE RUN NAME=URL ...

What training takes is kept in the file SAMPLES, for fits.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from policyline.publisher.training.trl_private import GuardedQueue
from policyline.publisher.trl import AsyncGRPOTrainer, PublishTo
from tests.acceptance.stock_trl import train


def keep_samples(file: Path) -> None:
    """Write each sample down as the trainer takes it."""
    take: Any = GuardedQueue.get

    def get(queue: GuardedQueue, timeout: float | None = None) -> Any:
        sample: Any = take(queue, timeout)
        known = {
            "version": int(sample.model_version),
            "input_ids": sample.input_ids.tolist(),
            "completion_mask": sample.completion_mask.tolist(),
            "old_log_probs": sample.old_log_probs.tolist(),
        }
        with file.open("a") as out:
            out.write(json.dumps(known) + "\n")
        return sample

    setattr(GuardedQueue, "get", get)  # noqa: B010 - of this process alone


if __name__ == "__main__":
    model, output, steps, samples, ledger, storage, run, *pairs = sys.argv[1:]
    servers = dict(pair.split("=", 1) for pair in pairs)
    to = PublishTo(ledger=ledger, storage=storage, run=run, servers=servers)
    first = next(iter(servers.values()))
    keep_samples(Path(samples))
    train(AsyncGRPOTrainer, model, output, first, int(steps), publish_to=to)
