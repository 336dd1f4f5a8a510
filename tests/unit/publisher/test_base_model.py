"""What config.json of a base model lets us claim, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policyline.publisher.check.base_model import read_layer_sizes
from policyline.publisher.errors import BaseModelInvalid
from tests.unit.publisher.builders import BASE_CONFIG


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**BASE_CONFIG, **changes}))
    return directory


def test_sizes_of_a_plain_block(tmp_path: Path) -> None:
    base = read_layer_sizes(write(tmp_path))
    assert base is not None
    assert base.layers == 2
    assert base.sizes == {
        "q_proj": (16, 16),
        "k_proj": (16, 8),
        "v_proj": (16, 8),
        "o_proj": (16, 16),
        "gate_proj": (16, 32),
        "up_proj": (16, 32),
        "down_proj": (32, 16),
    }


def test_a_head_size_of_its_own(tmp_path: Path) -> None:
    base = read_layer_sizes(write(tmp_path, model_type="qwen3", head_dim=32))
    assert base is not None
    assert base.sizes["q_proj"] == (16, 64)
    assert base.sizes["o_proj"] == (64, 16)


def test_claims_no_attention_sizes_where_the_head_size_is_not_written(tmp_path: Path) -> None:
    base = read_layer_sizes(write(tmp_path, model_type="gemma"))
    assert base is not None
    assert base.sizes["q_proj"] is None
    assert base.sizes["up_proj"] == (16, 32)


def test_claims_nothing_of_other_models(tmp_path: Path) -> None:
    assert read_layer_sizes(write(tmp_path, model_type="mixtral")) is None
    assert read_layer_sizes(Path("Qwen/Qwen3-4B")) is None


def test_names_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BaseModelInvalid, match=r"no readable config\.json.*--model"):
        read_layer_sizes(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BaseModelInvalid, match="num_hidden_layers"):
        read_layer_sizes(tmp_path)
