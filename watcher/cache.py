"""Local copies on the replica's own disk: fetched, verified, then visible at once.

`<root>/<ledger id>/<name>-<digest16>/` holds one version. The engine may read these files again
at any time while the name is registered, and dies when they are missing (vLLM 0.32), so a copy is
only ever repaired file by file, never swapped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from policyline.ledger.manifest import FileEntry
from policyline.storage import (
    ContentMismatch,
    FileMissing,
    Storage,
    StorageFull,
    UnsafePath,
    verify_files,
)
from policyline.watcher.errors import CacheInUse, CacheUnusable

_LOCK = ".lock"
_FETCHING = ".fetch-"
_TRASH = ".trash-"
_SPARE_BYTES = 64 << 20
"""Left free on the disk: the engine next to us writes there too."""

_Stamp = tuple[int, int, int]
"""(inode, size, mtime in ns) of a file."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """How long the two halves of a fetch took, in seconds."""

    fetch_s: float
    verify_s: float


class Cache:
    """The copies of one ledger's versions. Blocking; call it from a thread where bytes move.

    Args:
        root: directory that vLLM sees under the same path.
        ledger_id: copies of another ledger are never mixed up with these.
        limit_bytes: the most that all copies may take; None for what the disk holds.
    """

    def __init__(self, root: Path, ledger_id: str, limit_bytes: int | None = None) -> None:
        self._home = root.expanduser().resolve() / ledger_id
        self._limit_bytes = limit_bytes
        self._refused_bytes = 0
        self._lock: IO[str] | None = None
        self._stamps: dict[str, dict[str, _Stamp]] = {}
        self._verified: set[str] = set()

    @property
    def home(self) -> str:
        """Absolute path of the directory that holds the copies."""
        return str(self._home)

    def open(self) -> None:
        """Make the directory, lock it for this process, sweep what a former one left unfinished.

        Raises:
            CacheUnusable: it cannot be written.
            CacheInUse: another process holds it.
        """
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._lock = (self._home / _LOCK).open("a+")
        except OSError as error:
            raise CacheUnusable(
                f"cache {self._home} cannot be written: {error.strerror}",
                hint="make it writable for this user, or choose another --cache",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self._lock)
            self.close()
            raise CacheInUse(
                f"cache {self._home} is used by another sidecar{holder}",
                hint="stop that one first, also with --replace, or give each sidecar its own "
                "--cache",
            ) from error
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        for path in self._home.iterdir():
            if path.name.startswith((_FETCHING, _TRASH)):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Unlock. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def local(self, relied_on: Collection[str] | None = None) -> frozenset[str]:
        """Names of the copies that nobody touched since they were first seen.

        Args:
            relied_on: check the files of these only, of the others just the directory:
                copies that wait for their grace may be hundreds. None means all.

        Raises:
            OSError: the directory cannot be read.
        """
        copy_names = set()
        with os.scandir(self._home) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                stamps = self._stamps.get(entry.name)
                if stamps is None:
                    stamps = self._stamps[entry.name] = _stamps(self._home / entry.name)
                looked_at = relied_on is None or entry.name in relied_on
                if not looked_at or self._is_untouched(entry.name, stamps):
                    copy_names.add(entry.name)
        return frozenset(copy_names)

    def size_bytes(self) -> int:
        """Bytes in the copies, as they were when they were first seen."""
        # a copy of the values: a fetch in its thread may add one meanwhile
        return sum(size for stamps in [*self._stamps.values()] for _, size, _ in stamps.values())

    def exceeds_limit(self) -> bool:
        """Whether the copies, and the one that was refused last, are above the limit."""
        limit = self._limit_bytes
        return limit is not None and self.size_bytes() + self._refused_bytes > limit

    def verified(self, local: Collection[str]) -> frozenset[str]:
        """Those of the untouched copies `local` that were hashed by this process."""
        return frozenset(local) & self._verified

    def stale_caches(self) -> frozenset[str]:
        """Absolute paths of caches of other ledgers next to ours that no sidecar has locked."""
        found = set()
        for other in self._home.parent.iterdir():
            if other == self._home or not (other / _LOCK).is_file():
                continue
            with (other / _LOCK).open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # its sidecar is running
                found.add(str(other))
        return frozenset(found)

    def fetch(
        self, storage: Storage, name: str, entries: Sequence[FileEntry], copy_name: str
    ) -> Fetched:
        """Copy a version's files from storage, verify the copy, make it visible.

        Raises:
            StorageError: ContentMismatch after a second copy was wrong as well.
        """
        total = sum(entry.size_bytes for entry in entries)
        used = self.size_bytes()
        self._refused_bytes = 0
        if self._limit_bytes is not None and used + total > self._limit_bytes:
            self._refused_bytes = total
            raise StorageFull(
                f"cache {self._home} holds {used} bytes, {name} needs {total}, the limit is "
                f"{self._limit_bytes}",
                path=self._home,
                hint="raise --cache-limit; what vLLM may still read is never deleted",
            )
        free = shutil.disk_usage(self._home).free
        if free < total + _SPARE_BYTES:
            raise StorageFull(
                f"cache {self._home} has {free >> 20} MiB free, {name} needs {total / 2**20:.1f} "
                f"and {_SPARE_BYTES >> 20} stay free",
                path=self._home,
                hint="free space, or choose another --cache",
            )
        try:
            return self._fetch_once(storage, name, entries, copy_name)
        except ContentMismatch:
            # a mount or a cut-off transfer can hand out wrong bytes once; storage cannot
            return self._fetch_once(storage, name, entries, copy_name)

    def _fetch_once(
        self, storage: Storage, name: str, entries: Sequence[FileEntry], copy_name: str
    ) -> Fetched:
        staging = Path(tempfile.mkdtemp(prefix=_FETCHING, dir=self._home))
        try:
            started = time.perf_counter()
            storage.fetch(name, entries, staging)
            copied = time.perf_counter()
            verify_files(staging, entries)
            verified = time.perf_counter()
            staging.chmod(0o755)  # mkdtemp makes it private, and vLLM may be another user
            self._settle(staging, entries, copy_name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return Fetched(copied - started, verified - copied)

    def _settle(self, staging: Path, entries: Sequence[FileEntry], copy_name: str) -> None:
        final = self._home / copy_name
        if final.is_dir():
            for entry in entries:
                (final / entry.path).parent.mkdir(parents=True, exist_ok=True)
                (staging / entry.path).replace(final / entry.path)
        else:
            staging.rename(final)
        self._stamps[copy_name] = _stamps(final)
        self._verified.add(copy_name)

    def is_verified(self, copy_name: str) -> bool:
        """Whether the copy was hashed by this process and not touched since."""
        return copy_name in self._verified and self._is_untouched(
            copy_name, self._stamps[copy_name]
        )

    def verify(self, copy_name: str, entries: Sequence[FileEntry]) -> bool:
        """Hash the copy if need be; whether it is right. A wrong one is not `local` any more."""
        if self.is_verified(copy_name):
            return True
        self._verified.discard(copy_name)
        stamps = _stamps(self._home / copy_name)
        try:
            verify_files(self._home / copy_name, entries)
        except (ContentMismatch, FileMissing, UnsafePath):
            self._stamps[copy_name] = {"": (0, 0, 0)}  # equals no directory's
            return False
        self._stamps[copy_name] = stamps
        self._verified.add(copy_name)
        return True

    def delete(self, copy_name: str) -> None:
        """Remove a copy, or a stale cache by its absolute path; at once, idempotent."""
        trash = Path(tempfile.mkdtemp(prefix=_TRASH, dir=self._home))
        path = self._home / copy_name
        if path.is_dir():
            path.rename(trash / path.name)
        self._stamps.pop(copy_name, None)
        self._verified.discard(copy_name)
        shutil.rmtree(trash, ignore_errors=True)

    def _is_untouched(self, copy_name: str, stamps: dict[str, _Stamp]) -> bool:
        home = f"{self._home}/{copy_name}"  # a path object a file would cost more than its stat
        try:
            return bool(stamps) and all(
                _stamp(os.stat(f"{home}/{file}")) == stamp  # noqa: PTH116
                for file, stamp in stamps.items()
            )
        except OSError:
            return False


def _stamps(directory: Path) -> dict[str, _Stamp]:
    found: dict[str, _Stamp] = {}
    for here, _, files in os.walk(directory):
        for file in files:
            path = Path(here, file)
            found[str(path.relative_to(directory))] = _stamp(path.stat())
    return found


def _stamp(status: os.stat_result) -> _Stamp:
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _holder(lock: IO[str]) -> str:
    """Who wrote that it has the lock; empty when nobody did."""
    lock.seek(0)
    pid = lock.read(20).strip()
    return f", process {pid}" if pid.isdigit() else ""
