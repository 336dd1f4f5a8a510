"""Claims: what a publisher or a watcher holds between calls, and must still hold to append."""

from __future__ import annotations

from dataclasses import dataclass

from policyline.ledger.manifest import Anchor
from policyline.ledger.names import policy_name


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to publish to a run, until somebody claims a newer epoch."""

    line: str
    run: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """A version number given to one attempt."""

    line: str
    run: str
    version: int
    epoch: int
    attempt: str
    anchor: Anchor

    @property
    def name(self) -> str:
        """The policy name."""
        return policy_name(self.line, self.version)


@dataclass(frozen=True, slots=True)
class Membership:
    """The right to speak for a replica, until a newer watcher joins."""

    line: str
    replica: str
    generation: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a watcher reports of its engine when it joins or finds a new incarnation."""

    incarnation: str | None
    build: str = ""
    max_loras: int | None = None
