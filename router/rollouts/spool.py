"""The spool: rollouts on the local disk that the ledger does not have yet.

A rollout is appended with one `write` before the last byte of its answer is sent, so it survives a
kill -9 of this process. A sealed file never changes, and its name is the key of its batch in the
ledger: a batch that is uploaded twice is recorded once.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from policyline.ledger.rollouts import NewRollout
from policyline.router.errors import SpoolUnusable

_OPEN: Final = ".open"
_SEALED: Final = ".jsonl"
MAX_ROWS: Final = 2000
"""Rows in one file, which is one batch and one transaction of the ledger."""


class Spool:
    """A directory of recorded rollouts. One router uses it at a time.

    Args:
        directory: on a local disk; created when it is missing.

    Raises:
        SpoolUnusable: it cannot be written, or another router uses it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SpoolUnusable(
                f"spool {directory} cannot be written: {error.strerror}",
                hint="name another directory with --spool",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise SpoolUnusable(
                f"spool {directory} is in use by another router",
                hint="give each router its own --spool",
            ) from error
        self._file: int | None = None
        self._path = directory
        self._rows = 0
        for open_file in directory.glob(f"*{_OPEN}"):  # files of a router that was killed
            self._seal(open_file)

    def close(self) -> None:
        """Seal the open file and release the directory. Idempotent."""
        if self._lock >= 0:
            self.seal()
            os.close(self._lock)
            self._lock = -1

    def append(self, values: Sequence[object]) -> None:
        """Append one rollout; the kernel has it when this returns.

        Args:
            values: of the fields `policyline.ledger.rollouts.HASHED_FIELDS`, in their order.

        Raises:
            SpoolUnusable: the disk is full, or the directory is gone.
        """
        line = msgspec.json.encode(values) + b"\n"
        try:
            if self._file is None or self._rows >= MAX_ROWS:
                self._begin()
            assert self._file is not None
            written = os.write(self._file, line)
        except OSError as error:
            raise SpoolUnusable(f"a rollout could not be recorded: {error}") from error
        if written != len(line):
            self.seal()  # readers skip a torn line at the end of a file
            raise SpoolUnusable("a rollout could not be recorded: the disk is full")
        self._rows += 1

    def seal(self) -> None:
        """Seal the open file, so that it can be uploaded."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._seal(self._path)

    def sealed(self) -> list[str]:
        """Keys of the sealed batches, oldest first."""
        return sorted(p.stem for p in self._directory.glob(f"*{_SEALED}"))

    def read(self, batch: str) -> list[NewRollout]:
        """The rollouts of a sealed batch, the same at every call."""
        data = (self._directory / f"{batch}{_SEALED}").read_bytes()
        lines = data.split(b"\n")[:-1]  # a torn last line has no line end
        return [NewRollout(*msgspec.json.decode(line)) for line in lines]

    def remove(self, batch: str) -> None:
        """Delete a batch that the ledger has."""
        (self._directory / f"{batch}{_SEALED}").unlink(missing_ok=True)

    def quarantine(self, batch: str) -> Path:
        """Keep a batch that the ledger refuses under a name that is not tried again."""
        path = self._directory / f"{batch}.refused"
        (self._directory / f"{batch}{_SEALED}").rename(path)
        return path

    def _begin(self) -> None:
        self.seal()
        self._path = self._directory / f"{time.time_ns():020d}-{uuid.uuid4().hex}{_OPEN}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._rows = 0

    @staticmethod
    def _seal(path: Path) -> None:
        path.rename(path.with_suffix(_SEALED))
