"""Which versions can have generated each sample: MODEL STORAGE SAMPLES; one JSON object a line.

SAMPLES has the samples that training took, one JSON object a line. Each version's own weights are
asked what they say of a sample's tokens; the mean distance to what the server said is printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from policyline.ledger.names import DEFAULT_LINE, parse_policy_name

OF_EACH = 8


def scores(model: Any, sample: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities (natural log) of the completion's tokens; temperature 1."""
    tokens = torch.tensor(sample["input_ids"])
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].float()
    said = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]
    return said[torch.tensor(sample["completion_mask"][1:]).bool()]


def few_of_each(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last ones of each version: training takes hundreds, most of them too stale to use."""
    by_version: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        by_version[sample["version"]].append(sample)
    return [sample for found in by_version.values() for sample in found[-OF_EACH:]]


def main(base: str, storage: Path, file: Path) -> None:
    """Print for each sample its version and the distance of every version of the storage."""
    samples = few_of_each([json.loads(line) for line in file.read_text().splitlines()])
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    away: list[dict[int, float]] = [{} for _ in samples]
    for directory in sorted(storage.iterdir()):
        version = parse_policy_name(DEFAULT_LINE, directory.name)
        if version is None:
            continue
        adapted = PeftModel.from_pretrained(model, str(directory)).eval()
        for sample, found in zip(samples, away, strict=True):
            served = [
                p
                for p, mine in zip(sample["old_log_probs"], sample["completion_mask"], strict=True)
                if mine
            ]
            found[version] = float((scores(adapted, sample) - torch.tensor(served)).abs().mean())
        model = adapted.unload()
    for sample, found in zip(samples, away, strict=True):
        print(json.dumps({"version": sample["version"], "away": found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
