"""Whether an adapter's tensors are the LoRA that its configuration describes. Pure.

vLLM 0.32 accepts some wrong adapters without an error (a rank or hidden size that is too small,
layers that do not exist, NaN) and then serves something else. So all of it is checked before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from policyline.publisher.check.adapter_config import EMBEDDINGS, AdapterConfig
from policyline.publisher.check.base_model import LayerSizes
from policyline.publisher.check.safetensors_header import FLOAT_DTYPES, Layout, Tensor

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_FOREIGN: Sequence[tuple[re.Pattern[str], str]] = (
    (
        re.compile(r"\.lora_[AB]\.[^.]+\.weight$"),
        "an adapter's name inside tensor names; save with PEFT's save_pretrained",
    ),
    (re.compile(r"\.lora_magnitude"), "DoRA"),
    (re.compile(r"\.lora_embedding"), "LoRA on head or embeddings"),
    (re.compile(r"\.lora_[AB]\.bias$"), "bias of the LoRA layers"),
    (re.compile(r"\.bias$"), "trained bias"),
    (re.compile(r"^(?!.*lora_)"), "weights that are no LoRA"),
    (re.compile(""), "a tensor whose name vLLM does not know"),
)
"""Names other than `lora_A.weight` and `lora_B.weight`, and what they are; first match counts."""
_SHOWN = 2


def unservable_tensors(names: Iterable[str]) -> list[str]:
    """Reasons, from the tensors' names, why vLLM cannot serve them; each kind once."""
    reasons: dict[str, str] = {}
    for name in names:
        meaning = _foreign(name)
        if meaning is not None:
            reasons.setdefault(meaning, name)
    return [f"{meaning} (tensor {name!r:.160})" for meaning, name in reasons.items()]


def _foreign(name: str) -> str | None:
    found = _KEY.fullmatch(name)
    if found is None:
        return next(meaning for pattern, meaning in _FOREIGN if pattern.search(name))
    head = found["module"].rpartition(".")[2] in EMBEDDINGS
    return "LoRA on head or embeddings" if head else None


def check_lora(config: AdapterConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """Faults of dtype, of pairing and of rank. Names must have passed `unservable_tensors`."""
    if not tensors:
        return ["it holds no tensors: was it saved on a rank that has none of them?"]
    halves: dict[str, set[str]] = {}
    faults: list[str] = []
    for name, tensor in tensors.items():
        found = _KEY.fullmatch(name)
        assert found is not None
        halves.setdefault(found["module"], set()).add(found["half"])
        fault = _shape_fault(name, tensor, config.rank_of(found["module"]), found["half"])
        if fault is not None:
            faults.append(fault)
    for module, present in halves.items():
        if len(present) == 1:
            missing = "B" if "A" in present else "A"
            faults.append(f"{module} has no lora_{missing}")
    return faults


def _shape_fault(name: str, tensor: Tensor, rank: int, half: str) -> str | None:
    shape = tensor.shape
    if tensor.dtype not in FLOAT_DTYPES:
        return f"{name} is {tensor.dtype}, expected floating point"
    if len(shape) != 2 or 0 in shape:
        return (
            f"{name} has shape {shape}, expected two dimensions: was it saved on one rank "
            "of a sharded model?"
        )
    found = shape[0] if half == "A" else shape[1]
    if found != rank:
        return f"{name} has shape {shape}, so rank {found}; adapter_config.json says {rank}"
    return None


def check_base(config: AdapterConfig, layout: Layout, base: LayerSizes) -> list[str]:
    """Disagreements with the base model: layers, names and sizes."""
    faults = [f for name, shape in layout.items() for f in _base_faults(name, shape, base)]
    targets = config.target_modules
    if not faults and config.everywhere and not isinstance(targets, str):
        faults = _absent(targets, layout, base)
    return faults


def _base_faults(name: str, shape: tuple[int, ...], base: LayerSizes) -> list[str]:
    found = _KEY.fullmatch(name)
    assert found is not None
    module = found["module"]
    layer = _LAYER.search(module)
    if layer is not None and int(layer[1]) >= base.layers:
        return [f"{module} does not exist: {base.source} says {base.layers} layers"]
    suffix = module.rpartition(".")[2]
    if suffix not in base.sizes:
        return [f"{module} does not exist: {base.source} has {', '.join(sorted(base.sizes))}"]
    sizes = base.sizes[suffix]
    if sizes is None:
        return []
    expected, axis = (sizes[0], 1) if found["half"] == "A" else (sizes[1], 0)
    if shape[axis] != expected:
        return [f"{name} has shape {shape}, where {base.source} says {expected}, not {shape[axis]}"]
    return []


def _absent(targets: Sequence[str], layout: Layout, base: LayerSizes) -> list[str]:
    """Targets without a tensor, as in a shard that was saved alone."""
    present = {found["module"] for name in layout if (found := _KEY.fullmatch(name))}
    in_layers = {
        (int(layer[1]), module.rpartition(".")[2])
        for module in present
        if (layer := _LAYER.search(module))
    }
    whole = {target for target in targets if _LAYER.search(target)}  # names of single modules
    suffixes = {target.rpartition(".")[2] for target in targets if target not in whole}
    wanted = {(n, suffix) for n in range(base.layers) for suffix in suffixes & base.sizes.keys()}
    absent = [
        *(f"layer {layer} has no {suffix}" for layer, suffix in sorted(wanted - in_layers)),
        *(f"there is no {module}" for module in sorted(whole - present)),
    ]
    return [
        f"{what}, though it is in target_modules: was it saved on one rank of a sharded model?"
        for what in absent
    ]


def check_previous(layout: Layout, previous: Layout, name: str) -> list[str]:
    """Differences from the version before: a run's versions have the same tensors and shapes."""
    missing = [f"{tensor} is missing, {name} has it" for tensor in previous.keys() - layout.keys()]
    added = [f"{tensor} is new, {name} has it not" for tensor in layout.keys() - previous.keys()]
    changed = [
        f"{tensor} has shape {shape}, in {name} it has {previous[tensor]}"
        for tensor, shape in layout.items()
        if previous.get(tensor, shape) != shape
    ]
    return [*sorted(missing), *sorted(added), *sorted(changed)]


def summary(faults: Sequence[str]) -> str:
    """The first few faults in one line, and how many more there are."""
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more
