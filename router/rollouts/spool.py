"""The spool: answered requests, noted on the local disk before their last byte is sent.

A note is one `write` of one line to a file that nobody else writes, so it survives a kill -9 of
this process. Files are sealed and then never changed: the name of a sealed file is the key of its
batch in the ledger, so that shipping it twice records it once.
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
MOST_ROWS: Final = 2000
"""In one file: one batch, and one transaction of the ledger."""


class Spool:
    """A directory of noted rollouts. One router has it at a time.

    Args:
        directory: on a local disk; made when it is missing.

    Raises:
        SpoolUnusable: it cannot be written, or another router has it.
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
                f"spool {directory} belongs to another router that runs",
                hint="give each router its own --spool",
            ) from error
        self._file: int | None = None
        self._path = directory
        self._rows = 0
        for left in directory.glob(f"*{_OPEN}"):  # of a router that was killed
            self._seal(left)

    def close(self) -> None:
        """Seal what is open and let go. Idempotent."""
        if self._lock >= 0:
            self.seal()
            os.close(self._lock)
            self._lock = -1

    def note(self, values: Sequence[object]) -> None:
        """Write one rollout down; it is on the kernel's side when this returns.

        Args:
            values: of `policyline.ledger.rollouts.HASHED_FIELDS`, in their order.

        Raises:
            SpoolUnusable: the disk is full, or the directory is gone.
        """
        line = msgspec.json.encode(values) + b"\n"
        try:
            if self._file is None or self._rows >= MOST_ROWS:
                self._begin()
            assert self._file is not None
            written = os.write(self._file, line)
        except OSError as error:
            raise SpoolUnusable(f"a rollout could not be noted: {error}") from error
        if written != len(line):
            self.seal()  # the torn line ends a file: readers leave it out
            raise SpoolUnusable("a rollout could not be noted: the disk is full")
        self._rows += 1

    def seal(self) -> None:
        """Close the file that is written, so that it can be shipped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._seal(self._path)

    @property
    def open_rows(self) -> int:
        """Rows in the file that is written."""
        return 0 if self._file is None else self._rows

    def sealed(self) -> list[str]:
        """Batches to ship, oldest first."""
        return sorted(p.stem for p in self._directory.glob(f"*{_SEALED}"))

    def read(self, batch: str) -> list[NewRollout]:
        """The rollouts of a sealed batch; the same at each call."""
        data = (self._directory / f"{batch}{_SEALED}").read_bytes()
        lines = data.split(b"\n")[:-1]  # what lies behind the last line end is torn
        return [NewRollout(*msgspec.json.decode(line)) for line in lines]

    def remove(self, batch: str) -> None:
        """The ledger has it."""
        (self._directory / f"{batch}{_SEALED}").unlink(missing_ok=True)

    def put_aside(self, batch: str) -> Path:
        """The ledger refuses it for ever: keep it where it is not tried again."""
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
