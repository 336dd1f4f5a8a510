"""adapter_config.json: every reason at once, and no configuration that is half understood."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policyline.publisher.check.adapter_config import ConfigInvalid, parse_config
from tests.unit.publisher.builders import config


def reasons(**changes: Any) -> list[str]:
    return parse_config(json.dumps(config(**changes)))[1]


def test_a_plain_lora_has_nothing_against_it() -> None:
    parsed, against = parse_config(json.dumps(config(rank=4, rank_pattern={"down_proj": 8})))
    assert against == []
    assert (parsed.r, parsed.highest_rank, parsed.lora_alpha) == (4, 8, 8.0)
    assert parsed.target_modules == ("q_proj", "k_proj", "down_proj")
    assert parsed.base_model == "tiny"
    assert parsed.everywhere


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "DoRA (use_dora=True)"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"target_parameters": ["mlp.experts.gate"]}, "target_parameters"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has lm_head"),
        ({"target_modules": ["model.embed_tokens"]}, "target_modules has embed_tokens"),
        ({"target_modules": "lm_head"}, "target_modules has lm_head"),
        *(
            ({"init_lora_weights": init}, f"init_lora_weights='{init}'")
            for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "anything")
        ),
    ],
)
def test_names_what_vllm_cannot_serve(changes: dict[str, Any], says: str) -> None:
    (reason,) = reasons(**changes)
    assert says in reason


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "EVA", "orthogonal"])
def test_an_init_that_leaves_the_base_model_alone_is_fine(init: object) -> None:
    assert reasons(init_lora_weights=init) == []


def test_names_all_reasons_at_once() -> None:
    found = reasons(use_dora=True, modules_to_save=["score"], bias="all", init_lora_weights="pissa")
    assert len(found) == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"r": True}, "r is True"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"target_modules": None}, "target_modules is None"),
        ({"target_modules": [1]}, "target_modules is"),
        ({"rank_pattern": [1]}, "rank_pattern is"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of 'q_proj' is 0"),
        ({"rank_pattern": {"(": 4}}, r"rank_pattern has '\('"),
    ],
)
def test_refuses_a_field_without_a_usable_value(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        parse_config(json.dumps(config(**changes)))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"r": NaN}', r'{"r": "\ud800"}']
)
def test_refuses_what_is_no_json_object(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="not JSON"):
        parse_config(text)


@pytest.mark.parametrize(
    ("module", "rank"),
    [
        ("model.layers.0.mlp.down_proj", 8),
        ("model.layers.1.self_attn.q_proj", 16),
        ("model.layers.0.self_attn.q_proj", 2),
        ("model.layers.0.mlp.xdown_proj", 2),
    ],
)
def test_a_rank_pattern_fits_a_suffix_that_begins_at_a_dot(module: str, rank: int) -> None:
    pattern = {"down_proj": 8, r"layers\.1\..*q_proj": 16}
    parsed, _ = parse_config(json.dumps(config(rank_pattern=pattern)))
    assert parsed.rank_of(module) == rank
