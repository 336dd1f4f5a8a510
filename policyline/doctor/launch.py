"""The line that starts vLLM for a window, an adapter's rank and a base model."""

from __future__ import annotations

import shlex
from typing import Final

from policyline.doctor.model import Window

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank may be (vLLM 0.32, vllm/config/lora.py, MaxLoRARanks)."""
DEFAULT_RANK: Final = 16
"""vLLM's own default, used where no adapter has a rank."""


def served_rank(rank: int) -> int | None:
    """The smallest --max-lora-rank that serves a rank; None above vLLM's largest."""
    return next((allowed for allowed in RANKS if allowed >= rank), None)


def launch_line(window: Window, *, rank: int | None, base_model: str | None) -> str:
    """Environment and command, for a shell.

    `--max-cpu-loras` is twice the window because an unload frees nothing (vllm#54839); so the line
    also does without development routes.

    Args:
        window: versions that are served at once.
        rank: of the adapter; None when not known.
        base_model: directory or hub name; None leaves a placeholder.
    """
    limit = DEFAULT_RANK if rank is None else served_rank(rank) or rank
    words = [
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        "vllm",
        "serve",
        "MODEL" if base_model is None else shlex.quote(base_model),
        "--enable-lora",
        f"--max-loras {window.slots}",
        f"--max-cpu-loras {2 * window.slots}",
        f"--max-lora-rank {limit}",
    ]
    return " ".join(words)
