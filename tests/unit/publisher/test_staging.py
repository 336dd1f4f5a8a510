"""The copy is what was inspected, whole and finite, or nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from policyline.publisher.check.source import WEIGHTS_NAME, inspect
from policyline.publisher.check.staging import fill
from policyline.publisher.errors import CheckFailed
from policyline.storage import FileMissing
from tests.unit.publisher.builders import config, key, tensors, write_adapter


@pytest.fixture
def into(tmp_path: Path) -> Path:
    made = tmp_path / "staging"
    made.mkdir()
    return made


def test_copies_and_hashes(tmp_path: Path, into: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "notes").mkdir()
    (directory / "notes" / "a.md").write_text("hello")
    filled = fill(inspect(directory), into)
    assert [e.path for e in filled.files] == sorted(
        ["README.md", "adapter_config.json", WEIGHTS_NAME, "notes/a.md"]
    )
    for entry in filled.files:
        content = (into / entry.path).read_bytes()
        assert content == (directory / entry.path).read_bytes()
        assert (entry.size_bytes, entry.sha256) == (
            len(content),
            hashlib.sha256(content).hexdigest(),
        )
    assert filled.phases.keys() == {"save", "digest", "check"}
    assert min(filled.phases.values()) > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_finds_a_number_that_is_not_finite(
    tmp_path: Path, into: Path, bad: float, dtype: str
) -> None:
    weights = tensors(dtype=dtype)
    name = key(1, "mlp.down_proj", "A")
    weights[name][1, 3] = bad
    with pytest.raises(CheckFailed, match=f"{WEIGHTS_NAME}: tensor '{name}' holds NaN"):
        fill(inspect(write_adapter(tmp_path / "a", weights=weights)), into)


def test_a_configuration_changed_meanwhile(tmp_path: Path, into: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    source = inspect(directory)
    changed = json.dumps(config(lora_alpha=9))
    assert len(changed) == source.sizes["adapter_config.json"]
    (directory / "adapter_config.json").write_text(changed)
    with pytest.raises(CheckFailed, match=r"adapter_config\.json: it changed while"):
        fill(source, into)


def test_weights_that_grew_meanwhile(tmp_path: Path, into: Path) -> None:
    source = inspect(write_adapter(tmp_path / "a"))
    with (source.directory / WEIGHTS_NAME).open("ab") as opened:
        opened.write(b"x")
    with pytest.raises(CheckFailed, match=f"{WEIGHTS_NAME}: it changed while"):
        fill(source, into)


def test_a_file_that_went_meanwhile(tmp_path: Path, into: Path) -> None:
    source = inspect(write_adapter(tmp_path / "a"))
    (source.directory / WEIGHTS_NAME).unlink()
    with pytest.raises(FileMissing, match=WEIGHTS_NAME):
        fill(source, into)
