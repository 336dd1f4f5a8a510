"""Liveness of replicas and deadlines of the candidate, on the own monotonic clock; pure.

Any sidecar or router may observe; several may report the same, and the ledger takes it once.
No wall
clock decides anything: a replica is lost when its counter did not move for the TTL as seen
here, and the candidate's grace counts from the first ack seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.readiness import Elapsed, judge


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last movement of one replica's heartbeat."""

    generation: int
    counter: int
    since_s: float
    """When it was first seen at this counter."""


@dataclass(frozen=True, slots=True)
class CandidateTimer:
    """The candidate that is waited for."""

    candidate: int
    named_at_s: float
    acked_at_s: float | None = None
    """When its first ack was seen."""


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """What is known of the heartbeats."""

    last_read_s: float | None = None
    by_replica: Mapping[str, Heartbeat] = field(default_factory=dict)


def note_heartbeats(
    former: Heartbeats,
    counters: Mapping[str, tuple[int, int]],
    now: float,
    *,
    gap_s: float,
) -> Heartbeats:
    """Take a reading of the heartbeats into account.

    Args:
        former: what was known.
        counters: replica -> (generation, counter).
        now: monotonic, seconds.
        gap_s: after a longer time without a reading all replicas get a fresh start: while the
            ledger was unreachable, or we were frozen, nobody could be seen to beat.
    """
    known = former.by_replica
    fresh = former.last_read_s is None or now - former.last_read_s > gap_s
    found = {}
    for replica, (generation, counter) in counters.items():
        last = known.get(replica)
        moved = last is None or (last.generation, last.counter) != (generation, counter)
        since_s = now if fresh or moved or last is None else last.since_s
        found[replica] = Heartbeat(generation, counter, since_s)
    return Heartbeats(now, found)


def silent(
    heartbeats: Heartbeats, view: LineSnapshot, now: float, *, me: str | None, ttl_s: float
) -> dict[str, Heartbeat]:
    """The joined replicas, but this one (if any), whose heartbeat stood still for the TTL."""
    lost = {}
    for name, heartbeat in sorted(heartbeats.by_replica.items()):
        row = view.replicas.get(name)
        if row is None or name == me or row.state != "joined":
            continue
        if row.generation == heartbeat.generation and now - heartbeat.since_s >= ttl_s:
            lost[name] = heartbeat
    return lost


def time_candidate(
    timer: CandidateTimer | None, view: LineSnapshot, now: float
) -> CandidateTimer | None:
    """Take a view of the line into account: since when is its candidate named, and acked."""
    candidate = view.candidate
    if candidate is None:
        return None
    if timer is None or timer.candidate != candidate:
        timer = CandidateTimer(candidate, now)
    if timer.acked_at_s is None and view.acked_by(candidate):
        timer = replace(timer, acked_at_s=now)
    return timer


def due(
    timer: CandidateTimer | None, view: LineSnapshot, now: float
) -> tuple[Elapsed | None, float | None]:
    """The times to settle the candidate with, if it is due, and when to check again, if ever."""
    run = view.run
    if timer is None or run is None:
        return None, None
    timeout_at = timer.named_at_s + run.candidate_timeout_s
    times = [timeout_at]
    grace_over = False
    if timer.acked_at_s is not None:
        grace_at = timer.acked_at_s + run.ready_grace_s
        grace_over = grace_at <= now
        times.append(grace_at)
    elapsed = Elapsed(grace_over=grace_over, timed_out=timeout_at <= now)
    live = [r for r in view.replicas.values() if r.state == "joined"]
    residency = {
        r: row for (r, version), row in view.residency.items() if version == timer.candidate
    }
    if judge(run, live, residency, elapsed).outcome != "wait":
        return elapsed, None
    return None, min((t for t in times if t > now), default=None)
