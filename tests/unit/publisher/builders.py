"""Small adapters on disk, made with numpy and safetensors; valid by default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

HIDDEN = 16
MODULES: Mapping[str, tuple[int, int]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN // 2),
    "mlp.down_proj": (2 * HIDDEN, HIDDEN),
}
BASE_CONFIG: Mapping[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}

Tensors = dict[str, NDArray[Any]]


def key(layer: int, module: str, half: str) -> str:
    """A tensor's name as PEFT writes it."""
    return f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"


def tensors(*, seed: int = 0, rank: int = 2, layers: int = 2, dtype: str = "float32") -> Tensors:
    """Random A and B for every module of every layer."""
    rng = np.random.default_rng(seed)
    made: Tensors = {}
    for layer in range(layers):
        for module, (inputs, outputs) in MODULES.items():
            made[key(layer, module, "A")] = rng.normal(size=(rank, inputs)).astype(dtype)
            made[key(layer, module, "B")] = rng.normal(size=(outputs, rank)).astype(dtype)
    return made


def config(*, rank: int = 2, **changes: Any) -> dict[str, Any]:
    """What PEFT writes into adapter_config.json, as far as it matters."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "rank_pattern": {},
    } | changes


def write_adapter(
    directory: Path,
    *,
    seed: int = 0,
    rank: int = 2,
    weights: Mapping[str, NDArray[Any]] | None = None,
    **changes: Any,
) -> Path:
    """Write an adapter; `changes` go into its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    made = tensors(seed=seed, rank=rank) if weights is None else dict(weights)
    save_file(made, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config(rank=rank, **changes)))
    (directory / "README.md").write_text("# An adapter\n")
    return directory
