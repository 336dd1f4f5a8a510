"""The sizes of a base model's linear layers, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policyline.ledger.canonical import parse_object
from policyline.publisher.errors import BaseModelInvalid

_PLAIN_TYPES = frozenset(
    {"granite", "llama", "mistral", "olmo2", "qwen2", "smollm3"}
    | {"gemma", "gemma2", "gemma3_text", "qwen3"}
)
"""Model types of which a block is q, k, v, o, gate, up and down and nothing else
(transformers 5, `modeling_<type>.py`). Other types are not checked."""
_OWN_HEAD_SIZE = frozenset({"gemma", "gemma2", "gemma3_text", "qwen3"})
"""Types whose head size is not hidden size / heads when config.json leaves it out."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The layers of a base model that an adapter can change."""

    source: str
    """The file that this was read from, for messages."""
    layers: int
    sizes: Mapping[str, tuple[int, int] | None]
    """Name of each linear layer of a block -> (inputs, outputs); None where not known."""


def read_layer_sizes(directory: Path) -> LayerSizes | None:
    """The layers of the model in a local directory.

    Returns:
        None for a model type that is not checked, and when `directory` is none (a Hub id).

    Raises:
        BaseModelInvalid: it has no readable config.json.
    """
    if not directory.is_dir():
        return None
    path = directory / "config.json"
    try:
        raw = parse_object(path.read_text())
    except (OSError, ValueError) as error:
        raise BaseModelInvalid(
            f"base model {directory} has no readable config.json: {error!s:.120}",
            hint="give the directory that the servers load with --model, or leave it out",
        ) from error
    if raw.get("model_type") not in _PLAIN_TYPES:
        return None
    try:
        return LayerSizes(str(path), raw["num_hidden_layers"], _sizes(raw))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise BaseModelInvalid(f"{path} lacks a usable {error!s:.60}") from error


def _sizes(raw: Mapping[str, Any]) -> dict[str, tuple[int, int] | None]:
    hidden, inner, heads = (
        raw[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head_size = raw.get("head_dim")
    if head_size is None and raw["model_type"] not in _OWN_HEAD_SIZE:
        head_size = hidden // heads
    sizes: dict[str, tuple[int, int] | None] = {
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj")),
    }
    if head_size is not None:
        keys = (raw.get("num_key_value_heads") or heads) * head_size
        sizes |= {
            "q_proj": (hidden, heads * head_size),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (heads * head_size, hidden),
        }
    return sizes
