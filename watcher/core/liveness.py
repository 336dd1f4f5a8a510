"""What an observer owes the fleet when time matters; on its own monotonic clock, pure.

Any sidecar or router may observe; several may say the same, and the ledger takes it once. No wall
clock decides anything: a replica is lost when its counter stood still for the TTL before these
eyes, and the candidate's grace counts from the first ack that they saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.readiness import Elapsed, Wait, judge


@dataclass(frozen=True, slots=True)
class Pulse:
    """The last movement of one replica's heartbeat."""

    generation: int
    counter: int
    since_s: float
    """When it was first seen at this counter."""


@dataclass(frozen=True, slots=True)
class Vigil:
    """The candidate that is waited for."""

    candidate: int
    named_at_s: float
    acked_at_s: float | None = None
    """When its first ack was seen."""


@dataclass(frozen=True, slots=True)
class DeclareLost:
    """A replica's heartbeat stood still for the TTL."""

    replica: str
    generation: int
    counter: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Time decides about the candidate."""

    candidate: int
    elapsed: Elapsed


@dataclass(frozen=True, slots=True)
class Pulses:
    """What is known of the heartbeats."""

    last_read_s: float | None = None
    by_replica: Mapping[str, Pulse] = field(default_factory=dict)


def feel(
    pulses: Pulses,
    heartbeats: Mapping[str, tuple[int, int]],
    now: float,
    *,
    gap_s: float,
) -> Pulses:
    """Take a reading of the heartbeats into account.

    Args:
        pulses: what was known.
        heartbeats: replica -> (generation, counter).
        now: monotonic, seconds.
        gap_s: after a longer time without a reading all replicas get a fresh start: while the
            ledger was away, or we were frozen, nobody could be seen to beat.
    """
    known = pulses.by_replica
    fresh = pulses.last_read_s is None or now - pulses.last_read_s > gap_s
    found = {}
    for replica, (generation, counter) in heartbeats.items():
        former = known.get(replica)
        moved = former is None or (former.generation, former.counter) != (generation, counter)
        since_s = now if fresh or moved or former is None else former.since_s
        found[replica] = Pulse(generation, counter, since_s)
    return Pulses(now, found)


def silent(
    pulses: Pulses, view: LineSnapshot, now: float, *, me: str | None, ttl_s: float
) -> list[DeclareLost]:
    """The joined replicas, but this one (if any), whose heartbeat stood still for the TTL."""
    lost = []
    for name, pulse in sorted(pulses.by_replica.items()):
        row = view.replicas.get(name)
        if row is None or name == me or row.state != "joined":
            continue
        if row.generation == pulse.generation and now - pulse.since_s >= ttl_s:
            lost.append(DeclareLost(name, pulse.generation, pulse.counter))
    return lost


def keep_vigil(vigil: Vigil | None, view: LineSnapshot, now: float) -> Vigil | None:
    """Take a view of the line into account: since when is its candidate named, and acked."""
    candidate = view.candidate
    if candidate is None:
        return None
    if vigil is None or vigil.candidate != candidate:
        vigil = Vigil(candidate, now)
    if vigil.acked_at_s is None and view.acked_by(candidate):
        vigil = replace(vigil, acked_at_s=now)
    return vigil


def due(vigil: Vigil | None, view: LineSnapshot, now: float) -> tuple[Settle | None, float | None]:
    """What time has decided about the candidate, and when to look again; None for never."""
    run = view.run
    if vigil is None or run is None:
        return None, None
    timeout_at = vigil.named_at_s + run.candidate_timeout_s
    times = [timeout_at]
    grace_over = False
    if vigil.acked_at_s is not None:
        grace_at = vigil.acked_at_s + run.ready_grace_s
        grace_over = grace_at <= now
        times.append(grace_at)
    elapsed = Elapsed(grace_over=grace_over, timed_out=timeout_at <= now)
    live = [r for r in view.replicas.values() if r.state == "joined"]
    said = {r: row for (r, version), row in view.residency.items() if version == vigil.candidate}
    if not isinstance(judge(run, live, said, elapsed), Wait):
        return Settle(vigil.candidate, elapsed), None
    return None, min((t for t in times if t > now), default=None)
