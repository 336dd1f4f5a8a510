"""Errors of the storage.

    StorageError
    ├── SchemeUnsupported      a URL that names no kind of storage we know
    ├── StorageUnavailable     absent, unmounted or failing; the same call may work later
    ├── StorageUnwritable      read-only or forbidden
    ├── StorageFull            no space or quota left
    ├── NameTaken              the destination exists; nothing is ever replaced
    ├── FileMissing            a file or name that should be there is not
    ├── UnsafePath             a symbolic link or special file; never followed
    └── ContentMismatch        bytes differ from what was promised

Each carries `hint`, the remedy as one imperative sentence; the text of the error ends with it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policyline.errors import ExitCode, PolicylineError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class StorageError(PolicylineError):
    """Root of the storage's errors."""


class SchemeUnsupported(StorageError):
    """No storage of this kind exists."""

    exit_code = ExitCode.USAGE


class StorageUnavailable(StorageError):
    """The storage could not be read or written just now. Retrying later may help."""

    exit_code = ExitCode.UNREACHABLE


class StorageUnwritable(StorageError):
    """The storage may not be written by this user, or by nobody."""

    exit_code = ExitCode.UNREACHABLE


class StorageFull(StorageError):
    """No space or quota is left where `path` lies."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, message: str, *, path: Path, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class NameTaken(StorageError):
    """Something exists under the name already; it was left alone."""


class FileMissing(StorageError):
    """A file or name that should be there is not."""


class UnsafePath(StorageError):
    """A symbolic link or special file where a plain file or directory belongs."""


class ContentMismatch(StorageError):
    """A file's bytes are not the promised ones.

    Args:
        path: the file.
        expected: promised size in bytes or sha256 hex.
        found: the one that is there.
    """

    def __init__(self, message: str, *, path: Path, expected: str, found: str) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.found = found


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Translate errors of the operating system while `path` is read."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link(path) from error
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            raise FileMissing(f"{path} does not exist") from error
        raise StorageUnavailable(
            f"{path} cannot be read: {error.strerror}",
            hint="check that it is mounted and readable for this user",
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Translate errors of the operating system while `path` is written."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link(path) from error
        if error.errno in _FULL:
            raise StorageFull(
                f"no space left to write {path}: {error.strerror}",
                path=path,
                hint="free space or enlarge the volume",
            ) from error
        if error.errno in _FORBIDDEN:
            raise StorageUnwritable(
                f"{path} cannot be written: {error.strerror}",
                hint="make the directory writable for this user, or choose another",
            ) from error
        raise StorageUnavailable(
            f"{path} cannot be written: {error.strerror}",
            hint="check that the directory exists and is mounted",
        ) from error


def _link(path: Path) -> UnsafePath:
    return UnsafePath(
        f"{path} is a symbolic link, or lies behind one", hint="replace it by the file itself"
    )
