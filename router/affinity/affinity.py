"""Affinity: what `choose` decides from, kept up to date. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policyline.router.affinity.prefixes import Prefixes
from policyline.router.affinity.prompts import Chain
from policyline.router.choose import Candidate, Choice, Kind, choose
from policyline.router.gate import Seat

_Life = tuple[str, str]


@dataclass(slots=True)
class Load:
    """What one life of a replica has in hand."""

    in_flight: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    """Version -> its requests in flight."""

    def has_slot(self, version: int, slots: int | None) -> bool:
        """Whether the version may run beside the others: vLLM starves what has no slot."""
        return slots is None or version in self.versions or len(self.versions) < slots


class Ticket(NamedTuple):
    """A request that was given to a replica; hand it back with `end`."""

    seat: Seat
    version: int
    kind: Kind


class Affinity:
    """Chooses replicas and remembers what they hold and have in hand.

    Args:
        spill: how many requests the holder of a prefix may be ahead of the least loaded.
        max_blocks: bound of the memory for prefixes.
    """

    def __init__(self, *, spill: int, max_blocks: int) -> None:
        self._spill = spill
        self._prefixes = Prefixes(max_blocks)
        self._loads: dict[_Life, Load] = {}
        self.kinds: Counter[Kind] = Counter()
        """How often each kind of choice was made."""
        self.routed: Counter[str] = Counter()
        """Replica -> requests that it was sent."""

    def begin(
        self, version: int, digest: str, chain: Chain, seats: Sequence[Seat]
    ) -> Ticket | None:
        """Choose a seat and count the request there; None when no seat has a slot.

        Args:
            version: that every seat serves.
            digest: of the version.
            chain: of the prompt.
            seats: from the gate.
        """
        choice = self.choose(version, digest, chain, seats)
        if choice is None:
            return None
        seat = next(s for s in seats if s.replica == choice.replica)
        self._prefixes.own(digest, chain, seat)
        load = self._load(seat)
        load.in_flight += 1
        load.versions[version] += 1
        self.kinds[choice.kind] += 1
        self.routed[seat.replica] += 1
        return Ticket(seat, version, choice.kind)

    def choose(
        self, version: int, digest: str, chain: Chain, seats: Sequence[Seat]
    ) -> Choice | None:
        """What `begin` would choose; changes nothing."""
        held, owners = self._prefixes.holders(digest, chain)
        return choose([self._candidate(s, version, held, owners) for s in seats], self._spill)

    def _candidate(self, seat: Seat, version: int, held: int, owners: int) -> Candidate:
        load = self._load(seat)
        return Candidate(
            replica=seat.replica,
            held=held if owners & self._prefixes.bit(seat) else 0,
            in_flight=load.in_flight,
            routed=self.routed[seat.replica],
            has_slot=load.has_slot(version, seat.slots),
        )

    def end(self, ticket: Ticket) -> None:
        """The request is no longer in flight."""
        load = self._load(ticket.seat)
        load.in_flight -= 1
        load.versions[ticket.version] -= 1
        if load.versions[ticket.version] <= 0:
            del load.versions[ticket.version]
        if load.in_flight <= 0:  # lives that are over leave nothing behind
            del self._loads[ticket.seat.replica, ticket.seat.incarnation]

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

    def _load(self, seat: Seat) -> Load:
        life = (seat.replica, seat.incarnation)
        load = self._loads.get(life)
        if load is None:
            load = self._loads[life] = Load()
        return load
