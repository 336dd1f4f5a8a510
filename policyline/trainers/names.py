"""Which version a trainer's own number means. Pure: folded from the run's publications.

A trainer counts for itself, and begins again at 1 when it starts from scratch, or at a checkpoint's
number when it resumes; the ledger's numbers are never used twice. What a publication was called is
in its manifest, so the map and the version are one row and cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

TRAINER_NAME: Final = "trainer_name"
"""Metadata of a version: what its trainer calls it."""
TRAINER_SESSION: Final = "trainer_session"
"""Metadata of a version: the how many-th start of the trainer this is, as far as names tell."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a trainer's name means."""

    version: int
    digest: str
    session: int


@dataclass(slots=True)
class Names:
    """The names of one run; the newest use of each counts."""

    meanings: dict[str, Meaning] = field(default_factory=dict)
    session: int = 1
    newest: str = ""
    """The name that was published last."""

    def take(self, version: int, digest: str, metadata: Mapping[str, Any]) -> None:
        """Fold one publication in; those that no trainer named leave no trace."""
        name, session = metadata.get(TRAINER_NAME), metadata.get(TRAINER_SESSION)
        if isinstance(name, str) and isinstance(session, int):
            self.meanings[name] = Meaning(version, digest, session)
            self.session = max(self.session, session)
            self.newest = name

    def retried(self, name: str, digest: str) -> Meaning | None:
        """The last publication, if this is it again: same name and same bytes."""
        meaning = self.meanings.get(name)
        is_it = meaning is not None and name == self.newest and meaning.digest == digest
        return meaning if is_it else None

    def session_for(self, name: str) -> int:
        """The session that a load of `name` belongs to: a name used before begins a new one."""
        meaning = self.meanings.get(name)
        used = meaning is not None and meaning.session == self.session
        return self.session + 1 if used else self.session
