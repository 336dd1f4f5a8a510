"""Reads an adapter's directory as vLLM 0.32 does: what it refuses, what it overlooks, its texts.

Sources: vllm/lora/peft_helper.py, lora_model.py, utils.py; the texts were observed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Qwen2 or Llama block: what an adapter may target."""


class AdapterUnreadable(Exception):
    """vLLM refuses the adapter; the text is what its worker reports."""


class AdapterNotFound(AdapterUnreadable):
    """The directory or its adapter_config.json does not exist."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the double keeps of an adapter.

    Attributes:
        key: sha256 over scaling and tensors; empty when the adapter changes nothing (B is zero, or
            no tensor belongs to a layer of the model).
        finite: False when a tensor holds NaN or infinity.
        late_fault: the error that vLLM meets after it has made room for the adapter.
        stays: whether the id is in the CPU cache by then, and remains there: a zombie.
    """

    key: bytes
    finite: bool = True
    late_fault: str | None = None
    stays: bool = True


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What the server checks an adapter against. None: not checked."""

    max_lora_rank: int
    hidden_size: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def module(self) -> str:
        return self.name.removeprefix("base_model.model.").rsplit(".", 2)[0]


def read_weights(path: str, limits: AdapterLimits) -> Weights:
    """Read the adapter at `path`.

    Raises:
        AdapterNotFound: no such directory, or no adapter_config.json in it.
        AdapterUnreadable: anything else that vLLM notices while it reads.
    """
    directory = Path(path).expanduser()
    config = _read_config(directory)
    _check_config(config, limits)
    tensors = _read_tensors(directory)
    for tensor in tensors:
        _check_name(tensor, directory)
    return _summarise(config, tensors, limits)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        text = (directory / "adapter_config.json").read_text()
    except FileNotFoundError as error:
        raise AdapterNotFound(str(directory)) from error
    except OSError as error:
        raise AdapterUnreadable(str(error)) from error
    try:
        config = json.loads(text)
    except ValueError as error:
        raise AdapterUnreadable(str(error)) from error
    missing = {"r", "lora_alpha", "target_modules"} - config.keys()
    if missing:
        raise AdapterUnreadable(f"Missing required configuration fields: {missing}")
    return dict(config)


def _check_config(config: Mapping[str, Any], limits: AdapterLimits) -> None:
    rank = config["r"]
    if rank <= 0:
        raise AdapterUnreadable(f"LoRA rank `r` must be a positive integer, got {rank}.")
    faults = []
    saved = [m for m in config.get("modules_to_save") or () if m not in {"classifier", "score"}]
    if saved:
        faults.append(
            "vLLM only supports modules_to_save being either None or "
            '["classifier", "score"] for classification models. '
            f"Unsupported modules_to_save: {saved}"
        )
    if config.get("use_dora"):
        faults.append("vLLM does not yet support DoRA.")
    if config.get("lora_bias"):
        faults.append("vLLM does not support LoRA bias (lora_bias).")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        faults.append(f"vLLM does not support init_lora_weights={init!r}.")
    highest = max([rank, *(config.get("rank_pattern") or {}).values()])
    if highest > limits.max_lora_rank:
        faults.append(f"LoRA rank {highest} is greater than max_lora_rank {limits.max_lora_rank}.")
    if config.get("bias", "none") != "none":
        faults.append("Adapter bias is not supported.")
    if faults:
        raise AdapterUnreadable(" ".join(faults))


_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})


def _read_tensors(directory: Path) -> list[_Tensor]:
    try:
        content = (directory / "adapter_model.safetensors").read_bytes()
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except FileNotFoundError as error:
        raise AdapterUnreadable(f"{directory} doesn't contain tensors") from error
    except safetensors.SafetensorError as error:
        text = str(error).replace("deserializing:", "deserializing header:")  # as safe_open has it
        raise AdapterUnreadable(text) from error
    return [_Tensor(name, e["dtype"], tuple(e["shape"]), e["data"]) for name, e in sorted(entries)]


def _check_name(tensor: _Tensor, directory: Path) -> None:
    parts = tensor.name.split(".")
    if parts[-1] != "weight" or parts[-2] not in {"lora_A", "lora_B"}:
        raise AdapterUnreadable(f"{tensor.name} is unsupported LoRA weight")
    if tensor.module.rsplit(".", 1)[-1] not in MODULES:
        raise AdapterUnreadable(
            f"While loading {directory}, expected target modules in {set(MODULES)} but received "
            f"{[tensor.module]}. Please verify that the loaded LoRA module is correct"
        )


def _summarise(config: Mapping[str, Any], tensors: list[_Tensor], limits: AdapterLimits) -> Weights:
    unpaired = _unpaired(tensors)
    if not tensors:
        return Weights(b"", late_fault="", stays=False)
    if "lora_A" in unpaired.values():
        fault = "unsupported operand type(s) for *=: 'NoneType' and 'float'"
        return Weights(b"", late_fault=fault, stays=False)
    if any(module.endswith(("o_proj", "down_proj")) for module in unpaired):
        return Weights(b"", late_fault="")
    known = [tensor for tensor in tensors if _has_layer(tensor, limits)]
    changes = any(_is_b(t) and np.frombuffer(t.data, dtype=np.uint8).any() for t in known)
    return Weights(
        key=_key(config, known) if changes else b"",
        finite=all(map(_is_finite, known)),
        late_fault=next(filter(None, (_shape_fault(tensor, limits) for tensor in known)), None),
    )


def _unpaired(tensors: list[_Tensor]) -> dict[str, str]:
    """Return the modules with one half alone: path to `lora_A` or `lora_B`.

    A B without its A is refused only where vLLM does not fuse the layer with others; in q, k, v,
    gate and up it is overlooked. Observed.
    """
    halves: dict[str, list[str]] = {}
    for tensor in tensors:
        halves.setdefault(tensor.module, []).append(tensor.name.split(".")[-2])
    return {module: found[0] for module, found in halves.items() if len(found) == 1}


def _is_b(tensor: _Tensor) -> bool:
    return tensor.name.endswith("lora_B.weight")


def _has_layer(tensor: _Tensor, limits: AdapterLimits) -> bool:
    parts = tensor.module.split(".")
    if limits.layers is None or "layers" not in parts:
        return True
    return int(parts[parts.index("layers") + 1]) < limits.layers


def _shape_fault(tensor: _Tensor, limits: AdapterLimits) -> str | None:
    """A tensor is copied into a corner of vLLM's buffer: one that is too small goes unnoticed."""
    rank = tensor.shape[1] if _is_b(tensor) else tensor.shape[0]
    if rank > limits.max_lora_rank:
        return _mismatch(limits.max_lora_rank, rank, dimension=int(_is_b(tensor)))
    reads_hidden = tensor.name.split(".")[-3] in {"q_proj", "k_proj", "v_proj", "gate_proj"}
    if limits.hidden_size is None or _is_b(tensor) or not reads_hidden:
        return None
    width = tensor.shape[1]
    return _mismatch(limits.hidden_size, width, dimension=1) if width > limits.hidden_size else None


def _mismatch(ours: int, theirs: int, *, dimension: int) -> str:
    return (
        f"The size of tensor a ({ours}) must match the size of tensor b ({theirs}) "
        f"at non-singleton dimension {dimension}"
    )


def _key(config: Mapping[str, Any], tensors: list[_Tensor]) -> bytes:
    scaling = (config["r"], config["lora_alpha"], bool(config.get("use_rslora")))
    names = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    digest = hashlib.sha256(repr((scaling, names)).encode())
    for tensor in tensors:
        digest.update(tensor.data)
    return digest.digest()


_NUMBERS: dict[str, tuple[np.dtype[np.unsignedinteger[Any]], int, int]] = {
    "F32": (np.dtype("<u4"), 0x7FFFFFFF, 0x7F800000),
    "F16": (np.dtype("<u2"), 0x7FFF, 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7FFF, 0x7F80),
}
"""Bits of a number without its sign, and from which value on they are infinity or NaN."""


def _is_finite(tensor: _Tensor) -> bool:
    if tensor.dtype not in _NUMBERS:
        return True
    word, unsigned, infinity = _NUMBERS[tensor.dtype]
    numbers = np.frombuffer(tensor.data, dtype=word)
    return bool((numbers & unsigned).max(initial=0) < infinity)
