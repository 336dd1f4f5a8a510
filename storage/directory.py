"""Storage in a directory, local or mounted. POSIX calls, because durability needs fsync."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from policyline.ledger.manifest import FileEntry, check_path
from policyline.storage.errors import (
    FileMissing,
    NameTaken,
    StorageUnavailable,
    UnsafePath,
    reading,
    writing,
)
from policyline.storage.files import (
    copy_sized,
    read_head,
    sync_directory,
    sync_tree,
    verify_files,
    write_new,
)
from policyline.storage.interface import Staging

_STAGING = ".staging"
_DISCARDED = ".discarded"
_SEPARATOR = "~"
"""Occurs in no name and no attempt, so that both can be read back from a directory's name."""
_QUARANTINE = ".quarantine"
_EXISTS = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


class DirectoryStorage:
    """Each name is a directory below `root`; a rename within it makes a name visible at once.

    The rename is atomic on the writer's mount only: a reader on another mount may see a name
    late, or see it before its files, and must go by sizes and digests.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        """The directory."""
        return str(self.root)

    def locate(self, name: str) -> str:
        """The directory of a name."""
        return str(self._path(name))

    def check_writable(self) -> None:
        """Make and remove a directory: on a read-only mount even root cannot."""
        self._need_root()
        probe = self.root / f".probe{_SEPARATOR}{uuid.uuid4().hex}"
        with writing(self.root):
            probe.mkdir()
            probe.rmdir()

    def stage(self, name: str, attempt: str) -> Staging:
        """Make the staging directory, next to its destination and so on the same file system."""
        self._need_root()
        file_name = _SEPARATOR.join((_STAGING, _plain(name), _plain(attempt)))
        staging = Staging(name, attempt, self.root / file_name)
        with writing(staging.path):
            try:
                staging.path.mkdir()
            except FileExistsError as error:
                raise NameTaken(f"{staging.path} exists already") from error
        return staging

    def commit(self, staging: Staging) -> None:
        """Fsync files and directories, rename, fsync the parent."""
        destination = self._path(staging.name)
        if os.path.lexists(destination):
            raise _taken(destination)
        sync_tree(staging.path)
        with writing(destination):
            try:
                staging.path.rename(destination)
            except OSError as error:
                if error.errno in _EXISTS:
                    raise _taken(destination) from error
                raise
        sync_directory(self.root)

    def discard(self, staging: Staging) -> None:
        """Rename the staging, so that nobody can commit it any more, then remove it.

        Removing it without a rename could continue inside a directory that its owner, believed dead
        by its successor, has renamed meanwhile and another publisher has adopted.
        """
        doomed = staging.path.with_name(
            _SEPARATOR.join((_DISCARDED, staging.name, staging.attempt))
        )
        with writing(staging.path):
            with suppress(FileNotFoundError):
                staging.path.rename(doomed)
            with suppress(FileNotFoundError):  # another process removes it too
                shutil.rmtree(doomed)

    def read_head(self, name: str, file: str, max_bytes: int) -> bytes:
        """The first bytes of a file of a name."""
        return read_head(self._existing(name), file, max_bytes)

    def fetch(self, name: str, entries: Sequence[FileEntry], into: Path) -> None:
        """Copy listed files, each checked for its size, into a local directory."""
        directory = self._existing(name)
        for entry in entries:
            check_path(entry.path)
            destination = into / entry.path
            with writing(destination):
                destination.parent.mkdir(parents=True, exist_ok=True)
            copy_sized(directory, entry, destination)

    def confirm(self, name: str, entries: Sequence[FileEntry]) -> None:
        """Hash the files of a name without a copy, then fsync them and the root."""
        directory = self._existing(name)
        verify_files(directory, entries)
        sync_tree(directory)
        sync_directory(self.root)

    def files(self, name: str) -> list[str]:
        """Walk the directory of a name; links are listed, not followed."""
        directory = self._existing(name)
        with reading(directory):
            return sorted(_entries_below(directory))

    def names(self) -> list[str]:
        """Every entry that is not hidden, files and links included."""
        return [name for name in self._entries() if not name.startswith(".")]

    def stagings(self) -> list[Staging]:
        """Every staging directory by its name, and what is left of discarded ones."""
        split = [(name, name.split(_SEPARATOR)) for name in self._entries()]
        return [
            Staging(parts[1], parts[2], self.root / name)
            for name, parts in split
            if len(parts) == 3 and parts[0] in {_STAGING, _DISCARDED}
        ]

    def quarantine(self, name: str, attempt: str, why: str) -> str:
        """Move a name to `.quarantine/<name>-<attempt>`, with the reason in a file next to it."""
        shelf = self.root / _QUARANTINE
        destination = shelf / f"{_plain(name)}-{_plain(attempt)}"
        with writing(destination):
            shelf.mkdir(exist_ok=True)
            if os.path.lexists(destination):
                destination = destination.with_name(f"{destination.name}-{uuid.uuid4().hex[:8]}")
            try:
                self._path(name).rename(destination)
            except FileNotFoundError as error:
                raise FileMissing(f"{self._path(name)} does not exist") from error
        sync_directory(shelf)
        sync_directory(self.root)
        write_new(destination.with_name(f"{destination.name}.reason"), f"{why}\n".encode())
        return str(destination)

    def _path(self, name: str) -> Path:
        return self.root / _plain(name)

    def _existing(self, name: str) -> Path:
        """The directory of a name, which must be there and no link."""
        path = self._path(name)
        with reading(path):
            if path.is_symlink():
                raise UnsafePath(f"{path} is a symbolic link", hint="replace it by the directory")
            if path.is_dir():
                return path
        self._need_root()
        raise FileMissing(f"{path} does not exist")

    def _entries(self) -> list[str]:
        self._need_root()
        with reading(self.root):
            return sorted(path.name for path in self.root.iterdir())

    def _need_root(self) -> None:
        with reading(self.root):  # a broken mount fails here, an absent one is merely not there
            if self.root.is_dir():
                return
            is_there = self.root.exists()
        if is_there:
            raise StorageUnavailable(
                f"storage {self.root} is not a directory", hint="it is a file: name a directory"
            )
        raise StorageUnavailable(
            f"storage {self.root} does not exist",
            hint=f"mount it, or run: mkdir -p {shlex.quote(str(self.root))}",
        )


def _entries_below(directory: Path) -> Iterator[str]:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from (f"{path.name}/{below}" for below in _entries_below(path))
        else:
            yield path.name


def _taken(destination: Path) -> NameTaken:
    return NameTaken(
        f"{destination} exists already", hint="names are never reused; use another storage or line"
    )


def _plain(part: str) -> str:
    """Refuse what would be another directory than a child of the root, or ours to use."""
    if not part or part.startswith(".") or _SEPARATOR in part or "/" in part or "\0" in part:
        raise UnsafePath(f"{part!r:.200} cannot name anything in a storage")
    return part
