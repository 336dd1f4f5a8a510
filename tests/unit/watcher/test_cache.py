"""The local copies, on a real disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policyline.ledger.manifest import FileEntry
from policyline.storage import ContentMismatch, DirectoryStorage, FileMissing, StorageFull
from policyline.watcher.cache import Cache
from policyline.watcher.errors import CacheInUse, CacheUnusable

NAME, PLACE = "trl-policy-v1", "trl-policy-v1-0123456789abcdef"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}


def entries(files: dict[str, bytes]) -> list[FileEntry]:
    return [FileEntry(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in files.items()]


def store(root: Path, files: dict[str, bytes]) -> DirectoryStorage:
    (root / NAME).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / NAME / name).write_bytes(content)
    return DirectoryStorage(root)


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    return store(tmp_path / "storage", FILES)


@contextmanager
def opened(root: Path) -> Iterator[Cache]:
    made = Cache(root, "ledger1")
    made.open()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with opened(tmp_path / "cache") as made:
        yield made


def fetch(cache: Cache, storage: DirectoryStorage) -> None:
    cache.fetch(storage, NAME, entries(FILES), PLACE)


def contents(cache: Cache) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (Path(cache.home) / PLACE).iterdir()}


def hidden(cache: Cache) -> list[str]:
    return [p.name for p in Path(cache.home).iterdir() if p.name.startswith((".fetch", ".trash"))]


def test_a_fetched_version_is_local_verified_and_complete(
    cache: Cache, storage: DirectoryStorage
) -> None:
    fetch(cache, storage)

    assert cache.local() == {PLACE}
    assert cache.is_verified(PLACE)
    assert contents(cache) == FILES
    assert hidden(cache) == []


def test_other_users_may_read_the_copy(cache: Cache, storage: DirectoryStorage) -> None:
    fetch(cache, storage)

    assert (Path(cache.home) / PLACE).stat().st_mode & 0o055 == 0o055


def test_wrong_bytes_never_become_local(cache: Cache, tmp_path: Path) -> None:
    wrong = store(tmp_path / "wrong", {**FILES, "adapter_config.json": b"[]"})

    with pytest.raises(ContentMismatch):
        fetch(cache, wrong)

    assert cache.local() == frozenset()
    assert hidden(cache) == []


class HealingStorage(DirectoryStorage):
    """Hands out wrong bytes at the first fetch only, as a cut-off transfer does."""

    fetches = 0

    def fetch(self, name: str, entries: object, into: Path) -> None:
        super().fetch(name, entries, into)  # type: ignore[arg-type] # passed on as it came
        self.fetches += 1
        if self.fetches == 1:
            (into / "adapter_config.json").write_bytes(b"[]")


def test_bytes_that_are_wrong_once_are_fetched_again(cache: Cache, tmp_path: Path) -> None:
    store(tmp_path / "storage", FILES)

    fetch(cache, HealingStorage(tmp_path / "storage"))

    assert contents(cache) == FILES


def test_a_missing_version_is_missing(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(FileMissing):
        fetch(cache, DirectoryStorage(tmp_path / "empty"))


def test_more_than_the_disk_holds_is_refused_before_the_copy(
    cache: Cache, storage: DirectoryStorage
) -> None:
    huge = [FileEntry("adapter_model.safetensors", 1 << 60, "0" * 64)]

    with pytest.raises(StorageFull, match="MiB free"):
        cache.fetch(storage, NAME, huge, PLACE)


@pytest.mark.parametrize("harm", ["remove", "change"])
def test_a_touched_copy_is_not_local_until_it_is_repaired_in_place(
    cache: Cache, storage: DirectoryStorage, harm: str
) -> None:
    fetch(cache, storage)
    victim = Path(cache.home) / PLACE / "adapter_config.json"
    inode = victim.parent.stat().st_ino
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(b"[]!")

    assert cache.local() == frozenset()
    assert not cache.is_verified(PLACE)

    fetch(cache, storage)
    assert cache.local() == {PLACE}
    assert contents(cache) == FILES
    assert victim.parent.stat().st_ino == inode


class TestNextProcess:
    """The cache as a sidecar finds it after a restart."""

    @pytest.fixture
    def next_cache(self, cache: Cache, storage: DirectoryStorage) -> Iterator[Cache]:
        fetch(cache, storage)
        cache.close()
        with opened(Path(cache.home).parent) as made:
            yield made

    def test_a_copy_is_local_but_hashed_again_before_use(self, next_cache: Cache) -> None:
        assert next_cache.local() == {PLACE}
        assert not next_cache.is_verified(PLACE)
        assert next_cache.verify(PLACE, entries(FILES))
        assert next_cache.is_verified(PLACE)

    def test_a_wrong_copy_is_not_local_any_more(self, next_cache: Cache) -> None:
        (Path(next_cache.home) / PLACE / "adapter_config.json").write_bytes(b"[]")
        assert next_cache.local() == {PLACE}

        assert not next_cache.verify(PLACE, entries(FILES))

        assert next_cache.local() == frozenset()

    def test_unfinished_work_is_swept(self, cache: Cache, tmp_path: Path) -> None:
        (Path(cache.home) / ".fetch-abc").mkdir()
        (Path(cache.home) / ".fetch-abc" / "half").write_bytes(b"x")
        cache.close()

        with opened(tmp_path / "cache"):
            assert hidden(cache) == []


def test_delete_removes_the_copy_alone(cache: Cache, storage: DirectoryStorage) -> None:
    fetch(cache, storage)
    cache.fetch(storage, NAME, entries(FILES), "trl-policy-v2-0123456789abcdef")

    cache.delete(PLACE)
    cache.delete(PLACE)

    assert cache.local() == {"trl-policy-v2-0123456789abcdef"}
    assert hidden(cache) == []


def test_two_sidecars_cannot_share_a_cache(cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(CacheInUse, match="--cache"):
        Cache(tmp_path / "cache", "ledger1").open()

    cache.close()
    with opened(tmp_path / "cache") as freed:
        assert freed.local() == frozenset()


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CacheUnusable, match="choose another --cache"):
        Cache(tmp_path / "file", "ledger1").open()


class TestLimit:
    def test_what_does_not_fit_is_refused_with_the_path_and_asks_for_room(
        self, tmp_path: Path, storage: DirectoryStorage
    ) -> None:
        size = sum(map(len, FILES.values()))
        limited = Cache(tmp_path / "limited", "ledger1", limit_bytes=size + 1)
        limited.open()
        fetch(limited, storage)
        assert (limited.size_bytes(), limited.exceeds_limit()) == (size, False)

        other = "trl-policy-v1-fedcba9876543210"
        with pytest.raises(StorageFull, match="--cache-limit") as refused:
            limited.fetch(storage, NAME, entries(FILES), other)
        assert limited.home in str(refused.value)
        assert limited.exceeds_limit()

        limited.delete(PLACE)
        assert not limited.exceeds_limit()
        limited.fetch(storage, NAME, entries(FILES), other)
        limited.close()


class TestLeftovers:
    def test_the_copies_of_another_ledger_are_left_over_unless_its_sidecar_lives(
        self, tmp_path: Path, cache: Cache
    ) -> None:
        other = Cache(tmp_path / "cache", "ledger2")
        other.open()
        (tmp_path / "cache" / "not-ours").mkdir()
        assert cache.stale_caches() == frozenset()

        other.close()
        assert cache.stale_caches() == {other.home}

        cache.delete(other.home)
        assert not Path(other.home).exists()
        assert cache.stale_caches() == frozenset()
