"""Which replica gets a request. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["matched", "spilled", "unmatched"]
"""Sent to a holder of the prefix; elsewhere, because that one is too busy; nobody holds it."""


class Candidate(NamedTuple):
    """A replica that may serve the request."""

    replica: str
    held: int
    """How many of the prompt's specific blocks it holds, of this version."""
    in_flight: int
    """Requests that it has now, of all versions."""
    routed: int = 0
    """Requests that it was ever sent; settles a tie."""
    has_slot: bool = True
    """Whether it can run this version beside those in flight on it."""


class Choice(NamedTuple):
    """The replica, and why."""

    replica: str
    kind: Kind


def choose(candidates: Sequence[Candidate], spill: int) -> Choice | None:
    """Pick a replica; None when none has a slot for the version.

    Among those that hold most of the prompt it is the least loaded, unless that one is more than
    `spill` requests ahead of the least loaded of all. Ties go to the one that was sent fewest, then
    by name.
    """
    able = [c for c in candidates if c.has_slot]
    if not able:
        return None
    idlest = holder = able[0]
    for candidate in able[1:]:
        business = _business(candidate)
        if business < _business(idlest):
            idlest = candidate
        if (-candidate.held, business) < (-holder.held, _business(holder)):
            holder = candidate
    if holder.held == 0:
        return Choice(idlest.replica, "unmatched")
    if holder.in_flight - idlest.in_flight > spill:
        return Choice(idlest.replica, "spilled")
    return Choice(holder.replica, "matched")


def _business(candidate: Candidate) -> tuple[int, int, str]:
    return candidate.in_flight, candidate.routed, candidate.replica
