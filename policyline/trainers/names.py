"""Maps a trainer's own names to versions. Pure: folded from the run's publications.

A trainer counts its loads itself. It starts again at 1 from scratch, or at the checkpoint's number
when it resumes, while the ledger never uses a number twice. The trainer's name is stored in the
version's manifest, so name and version are one row and cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

TRAINER_NAME: Final = "trainer_name"
"""Metadata key of a version: the name its trainer gave it."""
TRAINER_SESSION: Final = "trainer_session"
"""Metadata key of a version: the number of the trainer's start, from 1. A name that comes again
shows a new start."""


@dataclass(frozen=True, slots=True)
class NamedVersion:
    """The version that a trainer's name means."""

    version: int
    digest: str
    session: int


@dataclass(slots=True)
class TrainerNames:
    """The trainer's names of one run. The newest use of a name counts."""

    versions: dict[str, NamedVersion] = field(default_factory=dict)
    session: int = 1
    newest: str = ""
    """The name of the last publication."""

    def take(self, version: int, digest: str, metadata: Mapping[str, Any]) -> None:
        """Fold one publication in. One without a trainer's name changes nothing."""
        name, session = metadata.get(TRAINER_NAME), metadata.get(TRAINER_SESSION)
        if isinstance(name, str) and isinstance(session, int):
            self.versions[name] = NamedVersion(version, digest, session)
            self.session = max(self.session, session)
            self.newest = name

    def retried(self, name: str, digest: str) -> NamedVersion | None:
        """The last publication, if it had this name and these bytes: a retry of the load."""
        named = self.versions.get(name)
        is_it = named is not None and name == self.newest and named.digest == digest
        return named if is_it else None

    def session_for(self, name: str) -> int:
        """The session that a load of `name` belongs to. A name used before starts a new one."""
        named = self.versions.get(name)
        used = named is not None and named.session == self.session
        return self.session + 1 if used else self.session
