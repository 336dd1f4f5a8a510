"""Plain files: copy, hash, verify, make durable. Symbolic links are refused, never followed."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from policyline.ledger.manifest import FileEntry, check_path
from policyline.storage.errors import ContentMismatch, UnsafePath, reading, writing

CHUNK_BYTES = 1 << 20
"""Large enough that the cost of a call is that of its bytes, small enough to stay in a CPU cache
between being read, hashed and written."""

_NO_DIRECTORY_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
"""What FUSE mounts of buckets answer to fsync of a directory: they have none to make durable."""


@contextmanager
def open_plain(directory: Path, file: str) -> Iterator[int]:
    """A descriptor for reading `file`, a POSIX path relative to `directory`, and no link on it.

    Raises:
        FileMissing: not there.
        UnsafePath: a component below `directory` is a symbolic link, or the end no plain file.
    """
    shown = directory / file
    *parents, last = file.split("/")
    with reading(directory):
        here = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            with reading(shown):
                below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        with reading(shown):
            # O_NONBLOCK: opening a FIFO must not wait for its writer
            found = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
    finally:
        os.close(here)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise UnsafePath(f"{shown} is not a plain file", hint="remove it")
        yield found
    finally:
        os.close(found)


def read_head(directory: Path, file: str, max_bytes: int) -> bytes:
    """The first bytes of `file`, at most `max_bytes`.

    Raises:
        FileMissing: no such file.
        UnsafePath: a link or special file.
    """
    content = b""
    with open_plain(directory, file) as source, reading(directory / file):
        while len(content) < max_bytes:
            piece = os.read(source, max_bytes - len(content))
            if not piece:
                break
            content += piece
    return content


def copy_hashed(directory: Path, file: str, destination: Path) -> tuple[FileEntry, float]:
    """Copy `file` of `directory` to the new file `destination`; each byte is read once.

    Returns:
        The file as it was read, and the seconds of it that were hashing.

    Raises:
        FileMissing: no such file.
        UnsafePath: a link or special file.
        StorageFull: the destination's file system.
    """
    state = hashlib.sha256()
    size = 0
    hash_s = 0.0
    with open_plain(directory, file) as source, _create(destination) as target:
        for chunk in _chunks(source, directory / file):
            started = time.perf_counter()
            state.update(chunk)
            hash_s += time.perf_counter() - started
            _write_all(target, chunk, destination)
            size += len(chunk)
    return FileEntry(file, size, state.hexdigest()), hash_s


def copy_sized(directory: Path, entry: FileEntry, destination: Path) -> None:
    """Copy a file that must have its entry's size; stops as soon as it has more.

    Raises:
        ContentMismatch: it has another size.
        FileMissing: no such file.
        UnsafePath: a link or special file.
    """
    size = 0
    with open_plain(directory, entry.path) as source, _create(destination) as target:
        for chunk in _chunks(source, directory / entry.path):
            size += len(chunk)
            if size > entry.size_bytes:
                break
            _write_all(target, chunk, destination)
        if size != entry.size_bytes:
            size = max(size, os.fstat(source).st_size)
            raise _wrong_size(directory / entry.path, entry, size)


def hash_file(path: Path) -> tuple[int, str]:
    """(size in bytes, sha256 hex) of a plain file.

    Raises:
        FileMissing: not there.
        UnsafePath: a link or special file.
    """
    with open_plain(path.parent, path.name) as source:
        return _hash(source, path)


def _hash(source: int, shown: Path) -> tuple[int, str]:
    state = hashlib.sha256()
    size = 0
    for chunk in _chunks(source, shown):
        state.update(chunk)
        size += len(chunk)
    return size, state.hexdigest()


def verify_files(directory: Path, entries: Sequence[FileEntry]) -> None:
    """Check that every listed file below `directory` has its size and sha256; no others.

    Raises:
        ContentMismatch: naming the file, what was promised and what is there.
        FileMissing: a file is not there.
        UnsafePath: a symbolic link on the way.
        ManifestInvalid: an entry's path leaves the directory.
    """
    for entry in entries:
        check_path(entry.path)
        path = directory / entry.path
        with open_plain(directory, entry.path) as source:
            size = os.fstat(source).st_size
            if size != entry.size_bytes:
                raise _wrong_size(path, entry, size)
            _, found = _hash(source, path)
        if found != entry.sha256:
            raise ContentMismatch(
                f"{path} has sha256 {found}, expected {entry.sha256}",
                path=path,
                expected=entry.sha256,
                found=found,
            )


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist."""
    with _create(path) as target:
        _write_all(target, memoryview(content), path)


def sync_tree(directory: Path) -> None:
    """Make every file and directory below and including `directory` durable."""
    for here, _, files in os.walk(directory):
        for file in files:
            path = Path(here, file)
            with open_plain(path.parent, file) as found, writing(path):
                os.fsync(found)
        sync_directory(Path(here))


def sync_directory(directory: Path) -> None:
    """Make a directory's entries durable, where its file system knows such a thing."""
    with reading(directory):
        found = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with writing(directory):
        try:
            os.fsync(found)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_FSYNC:
                raise
        finally:
            os.close(found)


def _wrong_size(path: Path, entry: FileEntry, size: int) -> ContentMismatch:
    return ContentMismatch(
        f"{path} has {size} bytes, expected {entry.size_bytes}",
        path=path,
        expected=str(entry.size_bytes),
        found=str(size),
    )


@contextmanager
def _create(path: Path) -> Iterator[int]:
    with writing(path):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        yield target
    finally:
        os.close(target)


def _chunks(source: int, shown: Path) -> Iterator[memoryview]:
    """The content in pieces; each is overwritten by the next."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while True:
        with reading(shown):
            count = os.readv(source, [buffer])
        if not count:
            return
        yield buffer[:count]


def _write_all(target: int, chunk: memoryview, shown: Path) -> None:
    with writing(shown):
        while chunk:
            chunk = chunk[os.write(target, chunk) :]
