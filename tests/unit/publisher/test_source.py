"""A directory is refused with the file, what is wrong and what to do; nothing is guessed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from policyline.publisher.check.base_model import read_layer_sizes
from policyline.publisher.check.source import MAX_CONFIG_BYTES, WEIGHTS_NAME, inspect
from policyline.publisher.errors import CheckFailed
from tests.unit.publisher.builders import key, tensors, write_adapter
from tests.unit.publisher.test_base_model import write as write_base


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def test_reads_what_peft_saves(adapter: Path) -> None:
    source = inspect(adapter)
    assert set(source.sizes) == {"README.md", "adapter_config.json", WEIGHTS_NAME}
    assert source.sizes[WEIGHTS_NAME] == (adapter / WEIGHTS_NAME).stat().st_size
    assert source.dtype == "F32"
    assert len(source.layout) == 12


def test_files_may_lie_deeper(adapter: Path) -> None:
    (adapter / "notes" / "more").mkdir(parents=True)
    (adapter / "notes" / "more" / "a.md").write_text("x")
    assert "notes/more/a.md" in inspect(adapter).sizes


def damage_missing(directory: Path) -> None:
    (directory / "adapter_config.json").unlink()


def damage_weights(directory: Path) -> None:
    (directory / WEIGHTS_NAME).unlink()


def damage_truncated(directory: Path) -> None:
    os.truncate(directory / WEIGHTS_NAME, (directory / WEIGHTS_NAME).stat().st_size - 4)


def damage_empty(directory: Path) -> None:
    os.truncate(directory / WEIGHTS_NAME, 0)


def damage_pickle(directory: Path) -> None:
    (directory / WEIGHTS_NAME).rename(directory / "adapter_model.bin")


def damage_extra(directory: Path) -> None:
    (directory / "training_args.yaml").write_text("x")


def damage_hidden(directory: Path) -> None:
    (directory / ".cache.json").write_text("x")


def damage_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("{}")


def damage_text(directory: Path) -> None:
    (directory / "adapter_config.json").write_bytes(b"\xff\xfe")


def damage_huge_config(directory: Path) -> None:
    os.truncate(directory / "adapter_config.json", MAX_CONFIG_BYTES + 1)


def damage_many(directory: Path) -> None:
    for number in range(300):
        (directory / f"{number}.md").touch()


def damage_fifo(directory: Path) -> None:
    os.mkfifo(directory / "pipe.json")


def damage_link(directory: Path) -> None:
    (directory / "link.json").symlink_to("/etc/hostname")


def damage_linked_directory(directory: Path) -> None:
    (directory / "link").symlink_to("/etc")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_missing, r"adapter: it has no adapter_config\.json; save it with PEFT"),
        (damage_weights, r"adapter: it has no adapter_model\.safetensors; save it with PEFT"),
        (damage_truncated, r"safetensors: it is not a complete .* its header accounts for \d+;"),
        (damage_empty, r"safetensors: it is not a complete .* 0 bytes"),
        (damage_pickle, r"adapter_model\.bin: it is a pickle.*safe_serialization=True"),
        (damage_extra, r"training_args\.yaml.*is not allowed in a version; keep only \.json"),
        (damage_hidden, r"\.cache\.json: path '\.cache\.json' is not a plain relative path"),
        (damage_manifest, r"manifest\.json: this name belongs to policyline; remove it"),
        (damage_text, r"adapter_config\.json: it is not UTF-8 text; save it again"),
        (damage_huge_config, r"adapter_config\.json: it has 1048577 bytes"),
        (damage_many, r"adapter: it has 303 files, allowed are 256"),
        (damage_fifo, r"pipe\.json: it is no plain file"),
        (damage_link, r"link\.json: it is a symbolic link.*cp -rL"),
        (damage_linked_directory, r"link: it is a symbolic link"),
    ],
)
def test_names_the_file_and_the_remedy(
    adapter: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(adapter)
    with pytest.raises(CheckFailed, match=says) as caught:
        inspect(adapter)
    assert "\n" not in str(caught.value)


def test_a_directory_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="gone: does not exist"):
        inspect(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(CheckFailed, match="file: is not a directory"):
        inspect(tmp_path / "file")


def test_names_everything_that_vllm_cannot_serve_at_once(tmp_path: Path) -> None:
    weights = tensors() | {"base_model.model.lm_head.weight": np.zeros((4, 4), "float32")}
    directory = write_adapter(tmp_path / "a", weights=weights, use_dora=True, bias="all")
    with pytest.raises(CheckFailed) as caught:
        inspect(directory)
    text = str(caught.value)
    for part in ("use_dora=True", "bias='all'", "base_model.model.lm_head.weight", "merged sync"):
        assert part in text


def test_a_rank_above_the_servers_limit(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", rank=16)
    assert inspect(directory, max_lora_rank=16).config.r == 16
    with pytest.raises(CheckFailed, match=r"rank 16 is above .* 8; .*--max-lora-rank 16"):
        inspect(directory, max_lora_rank=8)


def test_a_rank_that_is_not_the_configured_one(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", rank=2, weights=tensors(rank=1))
    with pytest.raises(CheckFailed, match=r"so rank 1; adapter_config\.json says 2"):
        inspect(directory)


def test_an_adapter_of_another_base_model(tmp_path: Path, adapter: Path) -> None:
    base = read_layer_sizes(write_base(tmp_path))
    assert inspect(adapter, base=base).layout
    other = read_layer_sizes(write_base(tmp_path, hidden_size=32))
    with pytest.raises(CheckFailed, match="does not fit the base model"):
        inspect(adapter, base=other)


def test_a_second_file_of_weights_is_read_too(adapter: Path) -> None:
    (adapter / "extra.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckFailed, match=r"extra\.safetensors: it is not a complete"):
        inspect(adapter)


def test_keys_with_the_adapters_name(tmp_path: Path) -> None:
    name = key(0, "self_attn.q_proj", "A")
    weights = {n.replace(".weight", ".default.weight"): t for n, t in tensors().items()}
    with pytest.raises(CheckFailed, match="save with PEFT's save_pretrained"):
        inspect(write_adapter(tmp_path / "a", weights=weights))
    assert name not in weights
