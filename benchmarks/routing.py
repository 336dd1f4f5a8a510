"""Where requests go: affinity against round-robin and least-loaded, on one reference trace.

1,460 prompts of 60 to 400 tokens that begin with one 23-token template, 8 rollouts each in their
order; a fixed number in flight; a new version every 512 rollouts. Answers take as long as they
have tokens. No engine and no clock: a heap of ends.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

from benchmarks.harness import Bar, Figure, Outcome, main
from policyline.router.affinity.affinity import Affinity, Assignment
from policyline.router.affinity.prompts import Chain, chain_of
from policyline.router.gate import Endpoint
from policyline.router.settings import RouterSettings

PROMPTS = 1460
QUICK_PROMPTS = 320
ROLLOUTS = 8
TEMPLATE_TOKENS = 23
BLOCK_TOKENS = 16
VERSION_EVERY = 512
FLOOR = 1 / ROLLOUTS
"""The first rollout of each prompt has nothing to match."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One request of the trace."""

    version: int
    digest: str
    chain: Chain
    duration_s: float


@dataclass(slots=True)
class Tally:
    """What a router did with the trace."""

    routed: dict[str, int] = field(default_factory=dict)
    spilled: int = 0
    unmatched: int = 0
    recomputed: int = 0
    """Prompt blocks that the chosen replica had not computed under this version before."""
    blocks: int = 0
    max_imbalance: int = 0
    """Greatest difference of requests in flight between two replicas."""

    @property
    def routed_ratio(self) -> float:
        """Requests of the busiest replica over those of the idlest, by the end."""
        return max(self.routed.values()) / max(1, min(self.routed.values()))


Pick = Callable[[Rollout], tuple[str, Callable[[], None]]]
"""Chooses a replica; returns it and what to call at the end of the request."""


def trace(prompts: int) -> list[Rollout]:
    """The reference workload, the same each time."""
    dice = random.Random(7)
    template = [dice.randrange(50_000) for _ in range(TEMPLATE_TOKENS)]
    found: list[Rollout] = []
    for _ in range(prompts):
        length = dice.randint(60, 400)
        prompt = template + [dice.randrange(50_000) for _ in range(length - TEMPLATE_TOKENS)]
        chain = chain_of({"prompt": prompt}, BLOCK_TOKENS)
        for _ in range(ROLLOUTS):
            version = len(found) // VERSION_EVERY + 1
            tokens = min(512, dice.lognormvariate(4.5, 0.8))
            found.append(
                Rollout(
                    version,
                    hashlib.sha256(str(version).encode()).hexdigest(),
                    chain,
                    0.05 + 0.015 * tokens,
                )
            )
    return found


def replay(rollouts: list[Rollout], replicas: list[str], in_flight: int, pick: Pick) -> Tally:
    """Run the trace with so many requests in flight at all times."""
    tally = Tally(routed=dict.fromkeys(replicas, 0))
    cached: dict[str, set[tuple[int, int]]] = {r: set() for r in replicas}
    busy = dict.fromkeys(replicas, 0)
    ends: list[tuple[float, int, str, Callable[[], None]]] = []
    now = 0.0
    for number, rollout in enumerate(rollouts):
        if len(ends) >= in_flight:
            now, _, replica, end = heapq.heappop(ends)
            busy[replica] -= 1
            end()
        replica, end = pick(rollout)
        tally.routed[replica] += 1
        busy[replica] += 1
        tally.max_imbalance = max(tally.max_imbalance, max(busy.values()) - min(busy.values()))
        keys = {(rollout.version, block) for block in rollout.chain}
        tally.blocks += len(keys)
        tally.recomputed += len(keys - cached[replica])
        cached[replica] |= keys
        heapq.heappush(ends, (now + rollout.duration_s, number, replica, end))
    return tally


def with_affinity(rollouts: list[Rollout], replicas: list[str], in_flight: int) -> Tally:
    """The router's own choice."""
    settings = RouterSettings()
    affinity = Affinity(spill=settings.spill, max_blocks=settings.max_blocks)
    endpoints = [Endpoint(r, "1", f"http://{r}", 6, 1) for r in replicas]

    def pick(rollout: Rollout) -> tuple[str, Callable[[], None]]:
        assignment = affinity.begin(rollout.version, rollout.digest, rollout.chain, endpoints)
        assert isinstance(assignment, Assignment)
        return assignment.endpoint.replica, lambda: affinity.end(assignment)

    tally = replay(rollouts, replicas, in_flight, pick)
    tally.spilled = affinity.kinds["spilled"]
    tally.unmatched = affinity.kinds["unmatched"]
    return tally


def round_robin(rollouts: list[Rollout], replicas: list[str], in_flight: int) -> Tally:
    """One after the other."""
    order = cycle(replicas)
    return replay(rollouts, replicas, in_flight, lambda _: (next(order), lambda: None))


def least_loaded(rollouts: list[Rollout], replicas: list[str], in_flight: int) -> Tally:
    """The one with the fewest requests in flight."""
    busy = dict.fromkeys(replicas, 0)

    def pick(_rollout: Rollout) -> tuple[str, Callable[[], None]]:
        replica = min(busy, key=lambda r: busy[r])
        busy[replica] += 1

        def end() -> None:
            busy[replica] -= 1

        return replica, end

    return replay(rollouts, replicas, in_flight, pick)


def measure(quick: bool) -> Outcome:
    """Run the benchmark."""
    rollouts = trace(QUICK_PROMPTS if quick else PROMPTS)
    figures: list[Figure] = []
    bars: list[Bar] = []
    for count in (2, 3):
        replicas = [f"r{n}" for n in range(count)]
        for in_flight in (128, 384):
            where = f"{count} replicas, {in_flight} in flight"
            ours = with_affinity(rollouts, replicas, in_flight)
            share = 100 / len(rollouts)
            recomputed = 100 * ours.recomputed / ours.blocks
            figures += [
                Figure(f"unmatched: {where}", ours.unmatched * share, "%", 100 * FLOOR),
                Figure(f"spilled: {where}", ours.spilled * share, "%"),
                Figure(f"max in-flight imbalance: {where}", ours.max_imbalance, "requests"),
                Figure(f"prefix blocks recomputed: {where}", recomputed, "%", 100 * FLOOR),
            ]
            for name, peer in (("round-robin", round_robin), ("least-loaded", least_loaded)):
                theirs = peer(rollouts, replicas, in_flight)
                repeated = 100 * theirs.recomputed / theirs.blocks
                figures.append(Figure(f"  the same, {name}", repeated, "%", 100 * FLOOR))
            bars += [
                Bar(f"unmatched, %: {where}", ours.unmatched * share, 13.0),
                Bar(f"spilled, %: {where}", ours.spilled * share, 1.3),
                Bar(f"max/min routed: {where}", ours.routed_ratio, 1.05),
            ]
    return Outcome(n=len(rollouts), figures=tuple(figures), bars=tuple(bars))


if __name__ == "__main__":
    main("routing", __doc__ or "", measure)
