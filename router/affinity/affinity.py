"""Which replica gets a request: the holder of its prefix, within bounds. No I/O, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
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


_Key = tuple[str, str]
"""Replica and incarnation."""


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
        self._loads: defaultdict[_Key, Counter[int]] = defaultdict(Counter)
        """Version -> requests in flight at that incarnation."""
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
        held, owners = self._prefixes.holders(digest, chain)
        options = [self._option(e, version, held, owners) for e in endpoints]
        choice = choose(options, self._spill)
        if choice is None:
            return None
        replica, kind = choice
        endpoint = next(e for e in endpoints if e.replica == replica)
        self._prefixes.own(digest, chain, endpoint)
        self._loads[endpoint.replica, endpoint.incarnation][version] += 1
        self.kinds[kind] += 1
        self.routed[endpoint.replica] += 1
        return Assignment(endpoint, version, kind)

    def _option(self, endpoint: Endpoint, version: int, held: int, owners: int) -> ReplicaOption:
        slots = endpoint.slots
        load = self._loads.get((endpoint.replica, endpoint.incarnation), Counter())
        return ReplicaOption(
            replica=endpoint.replica,
            held=held if owners & self._prefixes.bit(endpoint) else 0,
            in_flight=load.total(),
            routed=self.routed[endpoint.replica],
            # vLLM lets requests of a version without a slot starve
            has_slot=slots is None or version in load or len(load) < slots,
        )

    def end(self, assignment: Assignment) -> None:
        """The request is no longer in flight."""
        key = assignment.endpoint.replica, assignment.endpoint.incarnation
        load = self._loads[key]
        load[assignment.version] -= 1
        if load[assignment.version] <= 0:
            del load[assignment.version]
        if not load:  # nothing stays of an incarnation that ended
            del self._loads[key]

    def in_flight(self) -> Counter[str]:
        """Replica -> requests in flight."""
        found: Counter[str] = Counter()
        for (replica, _), load in self._loads.items():
            found[replica] += load.total()
        return found

    @property
    def known_blocks(self) -> int:
        """How many (version, block) pairs are remembered."""
        return len(self._prefixes)


def choose(options: Sequence[ReplicaOption], spill: int) -> tuple[str, ChoiceKind] | None:
    """Pick a replica, and say why it was; None when none has a slot for the version.

    Among those that hold most of the prompt it is the least loaded, unless that one is more than
    `spill` requests ahead of the least loaded of all. Ties go to the one that was sent fewest, then
    by name.
    """
    able = [option for option in options if option.has_slot]
    if not able:
        return None
    idlest = min(able, key=_load)
    holder = min(able, key=lambda option: (-option.held, _load(option)))
    if holder.held == 0:
        return idlest.replica, "unmatched"
    if holder.in_flight - idlest.in_flight > spill:
        return idlest.replica, "spilled"
    return holder.replica, "matched"


def _load(option: ReplicaOption) -> tuple[int, int, str]:
    return option.in_flight, option.routed, option.replica
