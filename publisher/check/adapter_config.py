"""Parses `adapter_config.json` and finds what in it vLLM cannot serve. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policyline.ledger.canonical import canonical, parse_object

CONFIG_NAME = "adapter_config.json"
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Inits that change only where training starts; all others change the base model's weights too
(vLLM 0.32, vllm/lora/peft_helper.py)."""
_REFUSED_FLAGS: Mapping[str, str] = {
    "use_dora": "DoRA",
    "lora_bias": "bias of the LoRA layers",
    "modules_to_save": "full copies of modules",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "trained token embeddings",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}
"""Options that must be unset or false (vLLM 0.32: peft_helper.py, and what POST
/v1/load_lora_adapter refuses)."""
EMBEDDINGS = frozenset({"lm_head", "embed_tokens", "embed_out", "wte", "word_embeddings"})


class ConfigInvalid(ValueError):
    """The text is not the configuration of a LoRA."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The parts of a LoRA's configuration that determine its tensors."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    """Suffixes of module names, or one regular expression."""
    rank_pattern: Mapping[str, int]
    base_model: str
    everywhere: bool
    """Every layer has every target: nothing is left out by pattern or layer number."""

    @property
    def highest_rank(self) -> int:
        """What a server's `--max-lora-rank` must allow."""
        return max([self.r, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int:
        """The rank of a module, by PEFT's rule: a pattern fits a suffix that begins at a dot."""
        for pattern, rank in self.rank_pattern.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return rank
        return self.r


def parse_config(text: str) -> tuple[AdapterConfig, list[str]]:
    """The configuration, and what in it vLLM cannot serve, as reasons.

    Raises:
        ConfigInvalid: not JSON, not a LoRA, or a field without a usable value.
    """
    try:
        raw = parse_object(text)
        canonical(raw).encode()  # refuses NaN, and text that UTF-8 cannot spell
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"it is not JSON: {error!s:.120}") from error
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ConfigInvalid(f"peft_type is {kind!r:.40}, only LORA can be served")
    targets = raw.get("target_modules")
    if isinstance(targets, list) and all(isinstance(t, str) for t in targets):
        targets = tuple(targets)
    elif not isinstance(targets, str):
        raise ConfigInvalid(f"target_modules is {targets!r:.80}, expected names")
    alpha = raw.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ConfigInvalid(f"lora_alpha is {alpha!r:.40}, expected a number")
    config = AdapterConfig(
        r=_rank("r", raw.get("r")),
        lora_alpha=float(alpha),
        target_modules=targets,
        rank_pattern=_ranks(raw.get("rank_pattern")),
        base_model=str(raw.get("base_model_name_or_path") or ""),
        everywhere=not any(
            raw.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules")
        ),
    )
    return config, _unservable(raw, targets)


def _unservable(raw: Mapping[str, Any], targets: tuple[str, ...] | str) -> list[str]:
    reasons = [
        f"{meaning} ({key}={raw[key]!r:.60})"
        for key, meaning in _REFUSED_FLAGS.items()
        if raw.get(key)
    ]
    bias = raw.get("bias", "none")
    if bias != "none":
        reasons.append(f"trained bias (bias={bias!r:.20})")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        reasons.append(f"an init that changes the base model (init_lora_weights={init!r:.40})")
    named = {t.rpartition(".")[2] for t in ([targets] if isinstance(targets, str) else targets)}
    heads = sorted(named & EMBEDDINGS)
    if heads:
        reasons.append(f"LoRA on head or embeddings (target_modules has {', '.join(heads)})")
    return reasons


def _ranks(raw: object) -> dict[str, int]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigInvalid(f"rank_pattern is {raw!r:.40}, expected an object")
    for pattern in raw:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigInvalid(f"rank_pattern has {pattern!r:.60}: {error}") from error
    return {pattern: _rank(f"rank_pattern of {pattern!r:.60}", n) for pattern, n in raw.items()}


def _rank(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigInvalid(f"{name} is {value!r:.40}, expected a whole number >= 1")
    return value
