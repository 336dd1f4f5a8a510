"""Writes LoRA adapters as PEFT saves them, without torch: for the double, tests and benchmarks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class BaseShape:
    """Sizes of a Qwen2 base model; the defaults are those of `policyline.demo.tiny_model`."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1

    def modules(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers of one block: path below the block to (in, out) features."""
        hidden, wide = self.hidden_size, self.intermediate_size
        narrow = hidden // self.heads * self.kv_heads
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden, narrow),
            "self_attn.v_proj": (hidden, narrow),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (hidden, wide),
            "mlp.up_proj": (hidden, wide),
            "mlp.down_proj": (wide, hidden),
        }


TINY = BaseShape()
_WIDE = BaseShape(hidden_size=1024, intermediate_size=2816, heads=16, kv_heads=2)


def adapter_config(
    rank: int = 1, *, base_model: str = "tiny", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the adapter_config.json of a plain LoRA on every linear layer, alpha = 2 rank."""
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 2 * rank,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": [module.rsplit(".", maxsplit=1)[-1] for module in TINY.modules()],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **(overrides or {}),
    }


def adapter_tensors(
    seed: int, *, rank: int = 1, shape: BaseShape = TINY, std: float = 0.3
) -> Tensors:
    """Return normal random tensors, A `(rank, in)` and B `(out, rank)`, under PEFT's names."""
    random = np.random.default_rng(seed)

    def draw(*size: int) -> NDArray[np.float32]:
        return std * random.standard_normal(size, dtype=np.float32)

    tensors: Tensors = {}
    for layer in range(shape.layers):
        for module, (inputs, outputs) in shape.modules().items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = draw(rank, inputs)
            tensors[f"{name}.lora_B.weight"] = draw(outputs, rank)
    return tensors


def write_adapter(
    directory: Path,
    seed: int,
    *,
    rank: int = 1,
    shape: BaseShape = TINY,
    size_bytes: int | None = None,
    std: float = 0.3,
) -> Path:
    """Write an adapter into `directory`, which is made, and return it.

    Different seeds give clearly different adapters.

    Args:
        directory: where adapter_config.json and adapter_model.safetensors go.
        seed: of the weights.
        rank: of A and B.
        shape: of the base model.
        size_bytes: size of the weights to come near to, instead of `shape`: as many layers of a
            model of 1024 features as it takes. Such an adapter is for the double only.
        std: standard deviation of the weights.
    """
    if size_bytes is not None:
        values = sum(rank * sum(features) for features in _WIDE.modules().values())
        shape = replace(_WIDE, layers=max(1, round(size_bytes / (4 * values))))
    tensors = adapter_tensors(seed, rank=rank, shape=shape, std=std)
    return write_files(directory, adapter_config(rank), tensors)


def write_files(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write the two files of an adapter, whatever is in them, and return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory
