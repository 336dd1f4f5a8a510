"""A PEFT model's LoRA: gathered from all ranks, saved by one. Works with torch and PEFT."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from policyline.publisher.check.adapter_config import CONFIG_NAME, ConfigInvalid, parse_config
from policyline.publisher.check.base_model import read_layer_sizes
from policyline.publisher.check.source import WEIGHTS_NAME, inspect
from policyline.publisher.errors import CheckFailed, NotSupported


@dataclass(frozen=True, slots=True)
class Gathered:
    """One adapter's complete tensors, on the CPU, named as PEFT saves them."""

    tensors: Mapping[str, Any]
    config: Any
    """The adapter's `peft.LoraConfig`."""

    def save(self, directory: Path) -> None:
        """Write what `PeftModel.save_pretrained` writes, without the model card."""
        save_file(dict(self.tensors), directory / WEIGHTS_NAME, metadata={"format": "pt"})
        save_config(self.config, directory)


def save_config(config: Any, directory: Path) -> None:
    """Write `adapter_config.json` as for inference."""
    inference = copy.copy(config)
    inference.inference_mode = True
    inference.save_pretrained(str(directory))


def peft_model_of(model: Any) -> Any:
    """The `PeftModel` inside what accelerate wrapped.

    Raises:
        NotSupported: there is none, or not exactly one adapter is active.
    """
    inner = extract_model_from_parallel(model)
    if not isinstance(inner, PeftModel):
        raise NotSupported(
            f"{type(inner).__name__} has no LoRA to publish",
            hint="give the trainer a peft_config; merged weights are not published",
        )
    if len(inner.active_adapters) != 1:
        raise NotSupported(
            f"{len(inner.active_adapters)} adapters are active ({inner.active_adapters})",
            hint="activate the one that is trained",
        )
    return inner


def gather(model: Any, adapter: str) -> Gathered:
    """The adapter's complete tensors.

    A collective: every rank must call it, since sharded parameters (FSDP2's DTensor) are gathered
    from all ranks.

    Args:
        model: from `peft_model_of`.
        adapter: the adapter's name in it.
    """
    own = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name and f".{adapter}." in name:
            tensor = parameter.detach()
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            own[name] = whole.to("cpu", copy=True).contiguous()
    # "auto" would ask the Hub for the base model's vocabulary
    tensors = get_peft_model_state_dict(
        model, state_dict=own, adapter_name=adapter, save_embedding_layers=False
    )
    return Gathered(tensors, model.peft_config[adapter])


def check_config(config: Any) -> None:
    """Refuse a configuration that vLLM cannot serve, before a model is loaded for it.

    Args:
        config: a `peft.PeftConfig`.

    Raises:
        CheckFailed: with every reason.
    """
    with tempfile.TemporaryDirectory() as scratch:
        save_config(config, Path(scratch))
        text = (Path(scratch) / CONFIG_NAME).read_text()
    try:
        _, reasons = parse_config(text)
    except ConfigInvalid as error:
        reasons = [str(error)]
    if reasons:
        raise CheckFailed(
            Path("peft_config"),
            f"vLLM cannot serve this adapter: {'; '.join(reasons)}",
            hint="train without it, or serve merged weights (merged sync)",
        )


def check_adapter(gathered: Gathered, base_model: str, max_lora_rank: int | None) -> None:
    """Refuse an adapter that could not be published, before the first step.

    Args:
        gathered: from every rank.
        base_model: the base model's directory; anything else checks no sizes.
        max_lora_rank: the servers' `--max-lora-rank`; None when not known.

    Raises:
        CheckFailed: with every reason.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        gathered.save(directory)
        inspect(directory, base=read_layer_sizes(Path(base_model)), max_lora_rank=max_lora_rank)
