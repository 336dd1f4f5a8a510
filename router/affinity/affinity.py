"""Which replica gets a request: the holder of its prefix, within bounds. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from policyline.router.affinity.prefixes import Prefixes
from policyline.router.affinity.prompts import Chain
from policyline.router.gate import Endpoint

ChoiceKind = Literal["matched", "spilled", "unmatched"]
"""Sent to a holder of the prefix; to another, as the holder is too busy; no replica holds it."""


class ReplicaOption(NamedTuple):
    """A replica that may serve the request, and what counts for and against it."""

    replica: str
    held: int
    """Blocks of the prompt that it holds for this version, without those of a common prefix."""
    in_flight: int
    """Its requests in flight, of all versions."""
    routed: int = 0
    """Requests sent to it so far; breaks ties."""
    has_slot: bool = True
    """Whether it has an adapter slot for this version, given the versions in flight on it."""


class ReplicaChoice(NamedTuple):
    """The chosen replica, and why."""

    replica: str
    kind: ChoiceKind


_Key = tuple[str, str]
"""Replica and incarnation."""


@dataclass(slots=True)
class ReplicaLoad:
    """Requests in flight at one incarnation of a replica."""

    in_flight: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    """Version -> requests in flight."""

    def has_slot(self, version: int, slots: int | None) -> bool:
        """Whether the version gets a slot now: vLLM lets requests without one starve."""
        return slots is None or version in self.versions or len(self.versions) < slots


class Assignment(NamedTuple):
    """A request that is counted at a replica until `end`."""

    endpoint: Endpoint
    version: int
    kind: ChoiceKind


class Affinity:
    """Chooses replicas; remembers the prefixes that they hold and the requests in flight.

    Args:
        spill: how many requests the holder of a prefix may be ahead of the least loaded.
        max_blocks: the most prefix blocks that are remembered.
    """

    def __init__(self, *, spill: int, max_blocks: int) -> None:
        self._spill = spill
        self._prefixes = Prefixes(max_blocks)
        self._loads: dict[_Key, ReplicaLoad] = {}
        self.kinds: Counter[ChoiceKind] = Counter()
        """Kind -> choices made."""
        self.routed: Counter[str] = Counter()
        """Replica -> requests sent to it."""

    def begin(
        self, version: int, digest: str, chain: Chain, endpoints: Sequence[Endpoint]
    ) -> Assignment | None:
        """Choose an endpoint and count the request there; None when none has a slot.

        Args:
            version: that every endpoint serves.
            digest: of the version.
            chain: of the prompt.
            endpoints: from the gate.
        """
        choice = self.choose(version, digest, chain, endpoints)
        if choice is None:
            return None
        endpoint = next(s for s in endpoints if s.replica == choice.replica)
        self._prefixes.own(digest, chain, endpoint)
        load = self._load(endpoint)
        load.in_flight += 1
        load.versions[version] += 1
        self.kinds[choice.kind] += 1
        self.routed[endpoint.replica] += 1
        return Assignment(endpoint, version, choice.kind)

    def choose(
        self, version: int, digest: str, chain: Chain, endpoints: Sequence[Endpoint]
    ) -> ReplicaChoice | None:
        """What `begin` would choose; changes nothing."""
        held, owners = self._prefixes.holders(digest, chain)
        return choose([self._candidate(s, version, held, owners) for s in endpoints], self._spill)

    def _candidate(self, endpoint: Endpoint, version: int, held: int, owners: int) -> ReplicaOption:
        load = self._load(endpoint)
        return ReplicaOption(
            replica=endpoint.replica,
            held=held if owners & self._prefixes.bit(endpoint) else 0,
            in_flight=load.in_flight,
            routed=self.routed[endpoint.replica],
            has_slot=load.has_slot(version, endpoint.slots),
        )

    def end(self, assignment: Assignment) -> None:
        """The request is no longer in flight."""
        load = self._load(assignment.endpoint)
        load.in_flight -= 1
        load.versions[assignment.version] -= 1
        if load.versions[assignment.version] <= 0:
            del load.versions[assignment.version]
        if load.in_flight <= 0:  # nothing stays of an incarnation that ended
            del self._loads[assignment.endpoint.replica, assignment.endpoint.incarnation]

    def in_flight(self) -> Counter[str]:
        """Replica -> requests in flight."""
        found: Counter[str] = Counter()
        for (replica, _), load in self._loads.items():
            found[replica] += load.in_flight
        return found

    @property
    def known_blocks(self) -> int:
        """How many (version, block) pairs are remembered."""
        return len(self._prefixes)

    def _load(self, endpoint: Endpoint) -> ReplicaLoad:
        key = (endpoint.replica, endpoint.incarnation)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = ReplicaLoad()
        return load


def choose(candidates: Sequence[ReplicaOption], spill: int) -> ReplicaChoice | None:
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
        return ReplicaChoice(idlest.replica, "unmatched")
    if holder.in_flight - idlest.in_flight > spill:
        return ReplicaChoice(idlest.replica, "spilled")
    return ReplicaChoice(holder.replica, "matched")


def _business(candidate: ReplicaOption) -> tuple[int, int, str]:
    return candidate.in_flight, candidate.routed, candidate.replica
