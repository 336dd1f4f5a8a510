"""A name appears whole or not at all, never changes, and leads nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import FileEntry
from policyline.storage import (
    ContentMismatch,
    DirectoryStorage,
    FileMissing,
    NameTaken,
    StorageError,
    StorageUnavailable,
    UnsafePath,
    hash_file,
    verify_files,
)

NAME = "trl-policy-v1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "storage"
    made.mkdir()
    return made


@pytest.fixture
def storage(root: Path) -> DirectoryStorage:
    return DirectoryStorage(root)


@pytest.fixture
def into(tmp_path: Path) -> Path:
    made = tmp_path / "local"
    made.mkdir()
    return made


def put(storage: DirectoryStorage, name: str = NAME, **files: str) -> list[FileEntry]:
    """Commit a name with these files (`a__b` is the file `a/b.json`)."""
    staging = storage.stage(name, "attempt")
    entries = []
    for key, content in (files or {"a": "hello"}).items():
        file = f"{key.replace('__', '/')}.json"
        (staging.path / file).parent.mkdir(parents=True, exist_ok=True)
        (staging.path / file).write_text(content)
        entries.append(FileEntry(file, *hash_file(staging.path / file)))
    storage.commit(staging)
    return entries


def test_a_name_is_visible_only_after_commit(storage: DirectoryStorage, root: Path) -> None:
    staging = storage.stage(NAME, "attempt")
    assert staging.path.parent == root
    (staging.path / "a.json").write_text("x")
    assert storage.names() == []
    assert storage.stagings() == [staging]
    storage.commit(staging)
    assert storage.names() == [NAME]
    assert storage.stagings() == []
    assert os.listdir(root) == [NAME]  # noqa: PTH208 - hidden ones too
    assert storage.locate(NAME) == str(root / NAME)


def test_fetches_what_was_committed(storage: DirectoryStorage, into: Path) -> None:
    entries = put(storage, a="one", deep__er__b="two" * 1_000_000)
    storage.fetch(NAME, entries, into)
    verify_files(into, entries)
    storage.confirm(NAME, entries)
    assert (into / "deep" / "er" / "b.json").read_text() == "two" * 1_000_000


@pytest.mark.parametrize("there", ["files", "empty", "file", "link"])
def test_nothing_is_ever_replaced(storage: DirectoryStorage, root: Path, there: str) -> None:
    if there == "files":
        put(storage, a="before")
    elif there == "empty":
        (root / NAME).mkdir()
    elif there == "file":
        (root / NAME).write_text("before")
    else:
        (root / NAME).symlink_to(root / "nowhere")
    staging = storage.stage(NAME, "another")
    with pytest.raises(NameTaken, match=f"{NAME} exists already; names are never reused"):
        storage.commit(staging)
    assert staging.path.is_dir()
    if there == "files":
        assert (root / NAME / "a.json").read_text() == "before"


def test_an_attempt_stages_once(storage: DirectoryStorage) -> None:
    storage.stage(NAME, "attempt")
    with pytest.raises(NameTaken):
        storage.stage(NAME, "attempt")
    assert storage.stage(NAME, "another").attempt == "another"


def test_a_staging_can_be_discarded_twice(storage: DirectoryStorage) -> None:
    staging = storage.stage(NAME, "attempt")
    (staging.path / "deep").mkdir()
    (staging.path / "deep" / "a.json").write_text("x")
    storage.discard(staging)
    storage.discard(staging)
    assert storage.stagings() == []
    with pytest.raises(StorageError):
        storage.commit(staging)
    assert storage.names() == []


def test_a_staging_cannot_be_committed_once_its_removal_has_begun(
    storage: DirectoryStorage,
) -> None:
    """Its owner lives, though a successor believes it dead, and commits at the worst moment."""
    staging = storage.stage(NAME, "attempt")
    (staging.path / "a.json").write_text("x")
    tried: list[str] = []

    def hook(_frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in {"unlink", "rmdir"} and not tried:
            tried.append(called.__name__)
            with pytest.raises(StorageError):
                storage.commit(staging)

    sys.setprofile(hook)
    try:
        storage.discard(staging)
    finally:
        sys.setprofile(None)
    assert tried
    assert storage.names() == []


def test_a_discarding_that_was_interrupted_is_finished(
    storage: DirectoryStorage, root: Path
) -> None:
    staging = storage.stage(NAME, "attempt")
    (staging.path / "a.json").write_text("x")
    staging.path.rename(root / f".discarded~{NAME}~attempt")
    (left,) = storage.stagings()
    assert (left.name, left.attempt) == (NAME, "attempt")
    storage.discard(left)
    assert list(root.iterdir()) == []


def test_reads_the_head_of_a_file(storage: DirectoryStorage) -> None:
    put(storage, a="hello")
    assert storage.read_head(NAME, "a.json", 2) == b"he"
    assert storage.read_head(NAME, "a.json", 99) == b"hello"
    with pytest.raises(FileMissing, match=r"b\.json does not exist"):
        storage.read_head(NAME, "b.json", 9)


def test_names_what_is_missing(storage: DirectoryStorage, into: Path) -> None:
    with pytest.raises(FileMissing, match=f"{NAME} does not exist"):
        storage.fetch(NAME, [], into)
    put(storage)
    with pytest.raises(FileMissing, match=r"gone\.json does not exist"):
        storage.fetch(NAME, [FileEntry("gone.json", 1, "0" * 64)], into)


def test_an_absent_root_is_unavailable_not_empty(tmp_path: Path, into: Path) -> None:
    storage = DirectoryStorage(tmp_path / "unmounted")
    for use in (
        storage.names,
        storage.stagings,
        lambda: storage.fetch(NAME, [], into),
        lambda: storage.stage(NAME, "a"),
    ):
        with pytest.raises(StorageUnavailable, match="mount it, or run: mkdir -p"):
            use()


def test_a_file_in_place_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnavailable, match=r"file is not a directory; .*name a directory$"):
        DirectoryStorage(tmp_path / "file").names()


def test_all_files_below_a_name_are_told_and_links_not_followed(
    storage: DirectoryStorage, tmp_path: Path
) -> None:
    put(storage, a="hello")
    (storage.root / NAME / "sub" / "empty").mkdir(parents=True)
    (storage.root / NAME / "sub" / "b").touch()
    (storage.root / NAME / "link").symlink_to(tmp_path)
    assert storage.files(NAME) == ["a.json", "link", "sub/b"]
    with pytest.raises(FileMissing):
        storage.files("trl-policy-v99")


@pytest.mark.parametrize("size", [0, 4, 6, 5_000_000])
def test_another_size_is_found_while_fetching(
    storage: DirectoryStorage, into: Path, size: int
) -> None:
    (entry,) = put(storage, a="hello")
    wrong = FileEntry(entry.path, size, entry.sha256)
    with pytest.raises(ContentMismatch, match=f"has 5 bytes, expected {size}") as caught:
        storage.fetch(NAME, [wrong], into)
    assert (caught.value.expected, caught.value.found) == (str(size), "5")
    with pytest.raises(ContentMismatch, match=f"has 5 bytes, expected {size}"):
        storage.confirm(NAME, [wrong])


def test_a_file_that_is_too_long_is_not_copied_whole(storage: DirectoryStorage, into: Path) -> None:
    (entry,) = put(storage, a="x" * 5_000_000)
    with pytest.raises(ContentMismatch, match="has 5000000 bytes"):
        storage.fetch(NAME, [FileEntry(entry.path, 10, entry.sha256)], into)
    assert (into / entry.path).stat().st_size == 0


def test_other_bytes_of_the_same_size(storage: DirectoryStorage, root: Path) -> None:
    (entry,) = put(storage, a="hello")
    (root / NAME / "a.json").write_text("hellO")
    with pytest.raises(ContentMismatch, match=rf"a\.json has sha256 .*, expected {entry.sha256}"):
        verify_files(root / NAME, [entry])


@pytest.mark.parametrize(
    "path", ["../a.json", "/etc/a.json", "a/../../b.json", "./a.json", ".a.json", "a\\b.json", ""]
)
def test_an_entry_cannot_leave_its_directory(
    storage: DirectoryStorage, into: Path, path: str
) -> None:
    put(storage)
    entry = FileEntry(path, 1, "0" * 64)
    with pytest.raises(ManifestInvalid):
        storage.fetch(NAME, [entry], into)
    with pytest.raises(ManifestInvalid):
        verify_files(into, [entry])


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "../x", "a/b", "/etc", "a~b", "a\0b"])
def test_a_name_cannot_leave_the_root(storage: DirectoryStorage, name: str) -> None:
    for use in (
        lambda: storage.stage(name, "a"),
        lambda: storage.stage("a", name),
        lambda: storage.read_head(name, "a.json", 1),
        lambda: storage.locate(name),
        lambda: storage.quarantine(name, "a", "why"),
    ):
        with pytest.raises(UnsafePath):
            use()


def test_links_are_not_followed(
    storage: DirectoryStorage, root: Path, into: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "a.json").write_text("secret")
    entry = FileEntry("a.json", *hash_file(secret / "a.json"))
    put(storage)
    (root / NAME / "a.json").unlink()
    (root / NAME / "a.json").symlink_to(secret / "a.json")
    (root / NAME / "deep").symlink_to(secret)
    (root / "whole").symlink_to(secret)
    below = FileEntry("deep/a.json", entry.size_bytes, entry.sha256)
    for name, wanted in ((NAME, entry), (NAME, below), ("whole", entry)):
        for use in (
            lambda name=name, wanted=wanted: storage.fetch(name, [wanted], into),
            lambda name=name, wanted=wanted: storage.confirm(name, [wanted]),
            lambda name=name, wanted=wanted: storage.read_head(name, wanted.path, 9),
        ):
            with pytest.raises(StorageError) as caught:
                use()
            assert not isinstance(caught.value, ContentMismatch)
    assert not any(path.is_file() for path in into.rglob("*"))


def test_a_pipe_does_not_block(storage: DirectoryStorage, root: Path, into: Path) -> None:
    (entry,) = put(storage)
    (root / NAME / "a.json").unlink()
    os.mkfifo(root / NAME / "a.json")
    with pytest.raises(UnsafePath, match="not a plain file"):
        storage.fetch(NAME, [entry], into)


def test_quarantine_hides_without_destroying(storage: DirectoryStorage, root: Path) -> None:
    put(storage, a="one")
    where = Path(storage.quarantine(NAME, "attempt", "nobody knows it"))
    assert storage.names() == []
    assert where == root / ".quarantine" / f"{NAME}-attempt"
    assert (where / "a.json").read_text() == "one"
    assert where.with_name(f"{where.name}.reason").read_text() == "nobody knows it\n"
    put(storage, a="two")
    again = Path(storage.quarantine(NAME, "attempt", "again"))
    assert (where / "a.json").read_text() == "one"
    assert (again / "a.json").read_text() == "two"


def test_full_disk_names_the_path(storage: DirectoryStorage) -> None:
    """A limit on file size stands in for a full disk: the same error class, from the kernel."""
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "from storage import StorageFull; from storage.files import write_new;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));\n"
        "try: write_new(Path(sys.argv[1]), bytes(2000))\n"
        "except StorageFull as error: print(error)"
    )
    path = storage.root / "a.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        f"no space left to write {path}: File too large; free space or enlarge the volume\n"
    )


def test_a_directory_of_somebody_else_names_the_remedy() -> None:
    code = (
        "import os, sys; from storage import StorageUnwritable, open_storage;"
        "os.geteuid() or os.setuid(65534)\n"  # root may write everywhere, nobody may not
        "try: open_storage(sys.argv[1]).check_writable()\n"
        "except StorageUnwritable as error: print(error)"
    )
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", code, root], capture_output=True, text=True, check=True
        )
    assert done.stdout == (
        f"{root} cannot be written: Permission denied; "
        "make the directory writable for this user, or choose another\n"
    )
