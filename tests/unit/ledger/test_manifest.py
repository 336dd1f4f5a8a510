"""Manifests: what they say round-trips, and nothing they say is believed unchecked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import Anchor, FileEntry, Manifest, version_digest

SHA = "a" * 64
FILES = (
    FileEntry("adapter_config.json", 10, SHA),
    FileEntry("adapter_model.safetensors", 1000, "b" * 64),
)


def make(files: tuple[FileEntry, ...] = FILES, **changes: Any) -> Manifest:
    manifest = Manifest(
        line="trl-policy",
        run="r1",
        version=7,
        epoch=1,
        attempt="abc",
        digest=version_digest(files),
        files=files,
        anchor=Anchor("f" * 32, 3, "c" * 64),
        adapter={"r": 1},
        metadata={"step": 12, "lr": 1e-5},
    )
    return dataclasses.replace(manifest, **changes)


def altered(**changes: Any) -> str:
    return json.dumps({**json.loads(make().to_text()), **changes})


def test_text_reads_back_equal() -> None:
    assert Manifest.from_text(make().to_text()) == make()


def test_name_and_size_come_from_its_parts() -> None:
    assert make().name == "trl-policy-v7"
    assert make().size_bytes == 1010


def test_digest_does_not_depend_on_the_order_of_files() -> None:
    assert version_digest(FILES) == version_digest(reversed(FILES))


@given(st.integers(0, 1), st.sampled_from(["path", "size_bytes", "sha256"]))
def test_digest_depends_on_every_field_of_every_file(which: int, field: str) -> None:
    other: Any = {"path": "x.json", "size_bytes": 11, "sha256": "d" * 64}[field]
    changed = list(FILES)
    changed[which] = dataclasses.replace(changed[which], **{field: other})
    assert version_digest(changed) != version_digest(FILES)


@pytest.mark.parametrize(
    "path",
    [
        "../evil.json",
        "/etc/x.json",
        "a/../b.json",
        "a//b.json",
        "./a.json",
        ".hidden.json",
        "a/.hidden/b.json",
        "a\\b.json",
        "a\x00.json",
        "a\n.json",
        "adapter_model.bin",
        "run.py",
        "noend",
        "",
        "x" * 600 + ".json",
    ],
)
def test_paths_that_leave_or_are_of_another_type_are_refused(path: str) -> None:
    files = (FileEntry(path, 1, SHA),)
    with pytest.raises(ManifestInvalid):
        Manifest.from_text(make(files).to_text())


def test_a_nested_plain_path_is_fine() -> None:
    files = (FileEntry("sub/adapter_model.safetensors", 1, SHA),)
    assert Manifest.from_text(make(files).to_text()).files == files


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "nonsense",
        altered(schema=2),
        altered(version=0),
        altered(version=True),
        altered(version="7"),
        altered(digest="0" * 64),
        altered(files=[]),
        altered(files=[{"path": "a.json", "size_bytes": -1, "sha256": SHA}]),
        altered(files=[{"path": "a.json", "size_bytes": 1, "sha256": "zz"}]),
        altered(anchor=None),
        altered(metadata=[]),
        altered(line="../x"),
        altered(run=5),
    ],
)
def test_malformed_manifests_are_refused(text: str) -> None:
    with pytest.raises(ManifestInvalid):
        Manifest.from_text(text)


def test_a_file_listed_twice_and_the_manifest_itself_are_refused() -> None:
    twice = (FILES[0], FILES[0])
    with pytest.raises(ManifestInvalid, match="twice"):
        Manifest.from_text(make(twice).to_text())
    itself = (FileEntry("manifest.json", 1, SHA),)
    with pytest.raises(ManifestInvalid, match="itself"):
        Manifest.from_text(make(itself).to_text())


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_and_never_crashes(text: str) -> None:
    with pytest.raises(ManifestInvalid):
        Manifest.from_text(text)
