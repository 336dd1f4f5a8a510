"""Tensors against their configuration, the base model and the version before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policyline.publisher.check.adapter_config import AdapterConfig, parse_config
from policyline.publisher.check.base_model import LayerSizes
from policyline.publisher.check.lora import (
    check_base,
    check_lora,
    check_previous,
    summary,
    unservable_tensors,
)
from policyline.publisher.check.safetensors_header import Tensor
from tests.unit.publisher.builders import HIDDEN, config, key, tensors

Q0A = key(0, "self_attn.q_proj", "A")
Q0B = key(0, "self_attn.q_proj", "B")
BASE = LayerSizes(
    "config.json",
    layers=2,
    sizes={
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (HIDDEN, HIDDEN // 2),
        "down_proj": (2 * HIDDEN, HIDDEN),
        "up_proj": None,
    },
)


def parsed(**changes: Any) -> AdapterConfig:
    return parse_config(json.dumps(config(**changes)))[0]


def shapes(*, rank: int = 2, layers: int = 2) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tensors(rank=rank, layers=layers).items()}


def as_tensors(layout: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, Tensor]:
    return {name: Tensor(dtype, shape, (0, 0)) for name, shape in layout.items()}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (Q0A.replace(".weight", ".default.weight"), "save with PEFT's save_pretrained"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "head or embeddings"),
        ("base_model.model.lm_head.lora_A.weight", "head or embeddings"),
        (Q0B.replace(".weight", ".bias"), "bias of the LoRA layers"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias", "trained bias"),
        ("base_model.model.lm_head.weight", "weights that are no LoRA"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "name vLLM does not know"),
        ("base_model.model.x.lora_C.weight", "name vLLM does not know"),
    ],
)
def test_says_what_a_foreign_tensor_comes_from(name: str, says: str) -> None:
    (reason,) = unservable_tensors({**shapes(), name: (2, 2)})
    assert says in reason
    assert name in reason


def test_names_each_kind_of_foreign_tensor_once() -> None:
    names = [f"base_model.model.layers.{n}.x.lora_magnitude_vector" for n in range(9)]
    assert len(unservable_tensors(dict.fromkeys(names, (2,)))) == 1


def test_a_whole_lora_is_fine() -> None:
    assert unservable_tensors(shapes()) == []
    assert check_lora(parsed(), as_tensors(shapes())) == []


@pytest.mark.parametrize("half", ["A", "B"])
def test_misses_the_other_half(half: str) -> None:
    layout = shapes()
    del layout[key(1, "mlp.down_proj", half)]
    assert check_lora(parsed(), as_tensors(layout)) == [
        f"model.layers.1.mlp.down_proj has no lora_{half}"
    ]


@pytest.mark.parametrize(("name", "shape"), [(Q0A, (4, HIDDEN)), (Q0B, (HIDDEN, 1))])
def test_the_rank_must_be_the_configured_one(name: str, shape: tuple[int, ...]) -> None:
    (fault,) = check_lora(parsed(), as_tensors(shapes() | {name: shape}))
    assert f"{name} has shape {shape}, so rank {4 if name == Q0A else 1}" in fault
    assert "says 2" in fault


def test_a_module_may_have_a_rank_of_its_own() -> None:
    layout = shapes() | {Q0A: (8, HIDDEN), Q0B: (HIDDEN, 8)}
    assert check_lora(parsed(rank_pattern={r"layers\.0\..*q_proj": 8}), as_tensors(layout)) == []


@pytest.mark.parametrize("shape", [(0,), (2,), (2, 3, 4), (2, 0)])
def test_a_flat_or_empty_tensor_is_a_shard(shape: tuple[int, ...]) -> None:
    (fault,) = check_lora(parsed(), as_tensors(shapes() | {Q0A: shape}))
    assert "one rank of a sharded model" in fault


def test_no_tensors_at_all_is_a_fault() -> None:
    assert "no tensors" in check_lora(parsed(), {})[0]


def test_numbers_must_be_floating_point() -> None:
    assert "is I8, expected floating point" in check_lora(parsed(), as_tensors(shapes(), "I8"))[0]


def test_fits_its_base_model() -> None:
    assert check_base(parsed(), shapes(), BASE) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({key(2, "self_attn.q_proj", "A"): (2, HIDDEN)}, "does not exist: config.json says 2"),
        ({key(0, "self_attn.qkv_proj", "A"): (2, HIDDEN)}, "qkv_proj does not exist"),
        ({Q0A: (2, HIDDEN // 2)}, f"says {HIDDEN}, not {HIDDEN // 2}"),
        ({Q0B: (HIDDEN // 2, 2)}, f"says {HIDDEN}, not {HIDDEN // 2}"),
    ],
)
def test_finds_what_the_base_model_has_not(changed: dict[str, tuple[int, ...]], says: str) -> None:
    (fault,) = check_base(parsed(), shapes() | changed, BASE)
    assert says in fault


def test_sizes_that_are_not_known_are_not_checked() -> None:
    layout = {key(layer, "mlp.up_proj", "A"): (2, 3) for layer in range(2)}
    assert check_base(parsed(target_modules=["up_proj"]), layout, BASE) == []


def test_a_layer_without_a_target_is_a_shard() -> None:
    faults = check_base(parsed(), shapes(layers=1), BASE)
    assert len(faults) == 3
    assert "layer 1 has no down_proj" in faults[0]


@pytest.mark.parametrize("changes", [{"layers_to_transform": [0]}, {"exclude_modules": ["k_proj"]}])
def test_layers_may_be_left_out_on_purpose(changes: dict[str, Any]) -> None:
    assert check_base(parsed(**changes), shapes(layers=1), BASE) == []


def test_the_version_before_must_look_alike() -> None:
    assert check_previous(shapes(), shapes(), "trl-policy-v1") == []
    shard = check_previous(shapes(layers=1), shapes(), "trl-policy-v1")
    assert len(shard) == 6
    assert "is missing, trl-policy-v1 has it" in shard[0]
    more = check_previous(shapes(), shapes(layers=1), "trl-policy-v1")
    assert "is new, trl-policy-v1 has it not" in more[0]
    ranks = check_previous(shapes(rank=4), shapes(), "trl-policy-v1")
    assert "has shape (4, 32), in trl-policy-v1 it has (2, 32)" in ranks[0]


def test_a_summary_stays_short() -> None:
    assert summary(["a", "b"]) == "a; b"
    assert summary(["a", "b", "c", "d"]) == "a; b; and 2 more"
