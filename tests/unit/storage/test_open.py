"""Which URLs name a storage."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from policyline.storage import (
    DirectoryStorage,
    SchemeUnsupported,
    StorageError,
    StorageUnavailable,
    create_if_missing,
    open_storage,
)


@pytest.mark.parametrize("prefix", ["", "file://", "local://"])
def test_a_path_or_file_url_is_a_directory(tmp_path: Path, prefix: str) -> None:
    opened = open_storage(f"{prefix}{tmp_path}")
    assert isinstance(opened, DirectoryStorage)
    assert opened.root == tmp_path
    assert opened.url == str(tmp_path)
    opened.check_writable()


def test_a_relative_path_is_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("versions").url == str(tmp_path / "versions")


@pytest.mark.parametrize("url", ["s3://bucket/x", "hf://buckets/a/b", "memory://x", "no://x", ""])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(SchemeUnsupported, match="give a path or file:// URL"):
        open_storage(url)


def test_opening_touches_nothing(tmp_path: Path) -> None:
    opened = open_storage(str(tmp_path / "later"))
    assert not (tmp_path / "later").exists()
    with pytest.raises(StorageUnavailable, match=r"later does not exist; .*mkdir -p"):
        opened.check_writable()


def test_a_missing_directory_is_created_once_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/new/versions"
    with caplog.at_level(logging.INFO):
        assert create_if_missing(url)
        assert not create_if_missing(url)
    assert [r.__dict__.get("event") for r in caplog.records].count("storage_created") == 1
    open_storage(url).check_writable()


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="versions cannot be written"):
        create_if_missing(str(tmp_path / "file" / "versions"))
