"""What a storage can do. A name is one flat, immutable set of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from policyline.ledger.manifest import FileEntry


@dataclass(frozen=True, slots=True)
class Staging:
    """A private, writable directory whose content is to become `name`."""

    name: str
    attempt: str
    path: Path
    """Local directory to write into; visible to nobody under `name` before `commit`."""


class Storage(Protocol):
    """Bytes under names. A name appears whole or not at all, and never changes afterwards.

    Every method may raise `StorageUnavailable`, which a later call may not; writers also
    `StorageUnwritable` and `StorageFull`.
    """

    @property
    def url(self) -> str:
        """Its location, for people and logs."""

    def locate(self, name: str) -> str:
        """The location of a name, for people and logs."""

    def check_writable(self) -> None:
        """Find out now, with a clear error, whether staging will be possible."""

    def stage(self, name: str, attempt: str) -> Staging:
        """An empty staging for one attempt.

        Raises:
            NameTaken: this very attempt has staged before.
        """

    def commit(self, staging: Staging) -> None:
        """Make the staged files durable, then visible under the name, at once.

        Raises:
            NameTaken: the name exists; the staging is left as it is.
        """

    def discard(self, staging: Staging) -> None:
        """Remove a staging and what is in it. Idempotent."""

    def read_head(self, name: str, file: str, max_bytes: int) -> bytes:
        """The first bytes of a file, at most `max_bytes`.

        Raises:
            FileMissing: no such name or file.
            UnsafePath: a symbolic link on the way.
        """

    def fetch(self, name: str, entries: Sequence[FileEntry], into: Path) -> None:
        """Copy the listed files into the local directory `into`. Hashes nothing.

        Raises:
            FileMissing: no such name or file.
            ContentMismatch: a file has another size than its entry; found before much is copied.
            UnsafePath: a symbolic link on the way.
        """

    def confirm(self, name: str, entries: Sequence[FileEntry]) -> None:
        """Check without a copy that the name holds these bytes, and make them and the name durable.

        For a name whose `commit` nobody saw return. Raises what `verify_files` raises.
        """

    def files(self, name: str) -> list[str]:
        """Everything below a name but directories, links included: relative POSIX paths, sorted.

        Raises:
            FileMissing: no such name.
        """

    def names(self) -> list[str]:
        """Every visible name, of every owner, sorted."""

    def stagings(self) -> list[Staging]:
        """Every staging, of every owner."""

    def quarantine(self, name: str, attempt: str, why: str) -> str:
        """Take a name out of sight without destroying it; returns where it went.

        Raises:
            FileMissing: there is no such name.
        """
