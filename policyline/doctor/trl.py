"""How TRL's AsyncGRPOTrainer would bring an adapter to the servers: alone, or merged into the base.

Source: TRL 1.16, trl/experimental/async_grpo/async_grpo_trainer.py (`select_adapter_sync`,
`validate_lora_for_vllm_sync`). It reads the configuration and GET /server_info only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from policyline.doctor.engine_facts import ServerConfig

SyncMode = Literal["adapter", "merged", "refuses"]
"""`refuses`: the trainer raises when it starts."""


def choose(
    config: Mapping[str, Any], server: ServerConfig | None, max_staleness: int
) -> tuple[SyncMode, str]:
    """TRL's choice, and why.

    Args:
        config: of adapter_config.json.
        server: None where the server does not report it, or none was given.
        max_staleness: of the training arguments.
    """
    merged = [*_server_reasons(server), *_not_alone(config)]
    if merged:
        return "merged", "; ".join(merged)
    refusals = [] if server is None else list(_refusals(config, server, max_staleness))
    return ("refuses" if refusals else "adapter"), "; ".join(refusals)


def _server_reasons(server: ServerConfig | None) -> Iterator[str]:
    if server is not None and not server.has_lora:
        yield "the server was started without --enable-lora"
    if server is not None and server.data_parallel > 1:
        yield f"the server has data_parallel_size {server.data_parallel}"


def _refusals(config: Mapping[str, Any], server: ServerConfig, max_staleness: int) -> Iterator[str]:
    patterns = config.get("rank_pattern")
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    rank = max(rank if isinstance(rank, int) else 0 for rank in ranks)
    if server.max_lora_rank is not None and server.max_lora_rank < rank:
        yield f"rank {rank} is above --max-lora-rank {server.max_lora_rank}"
    if server.max_loras is not None and server.max_loras < max_staleness + 2:
        yield f"--max-loras {server.max_loras} is below {max_staleness + 2}"


def _not_alone(config: Mapping[str, Any]) -> Iterator[str]:
    """What an adapter's checkpoint cannot carry, by TRL's list."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type is {config.get('peft_type')!r:.40}"
    for key in ("modules_to_save", "use_dora", "target_parameters"):
        if config.get(key):
            yield f"{key}={config[key]!r:.60}"
    if config.get("bias", "none") != "none":
        yield f"bias={config['bias']!r:.20}"
    targets = config.get("target_modules") or []
    named = [targets] if isinstance(targets, str) else targets
    if any("lm_head" in str(module) or "embed_tokens" in str(module) for module in named):
        yield "target_modules names the head or the embeddings"
