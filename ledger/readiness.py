"""Readiness: when the candidate becomes current, and who is the next. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from policyline.ledger.rows import ReplicaRow, ResidencyRow, RunRow


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the candidate: it becomes current, is given up, or neither yet."""

    outcome: Literal["advance", "withdraw", "wait"]
    reason: str


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Time that passed on the observer's own monotonic clock; no wall clock decides."""

    grace_over: bool = False
    """`ready_grace_s` has passed since the observer saw the first ack of this candidate."""
    timed_out: bool = False
    """`candidate_timeout_s` has passed since the observer saw this candidate named."""


NOTHING_ELAPSED = Elapsed()


def is_acked(replica: ReplicaRow, residency: ResidencyRow | None) -> bool:
    """Whether the replica's present incarnation holds an ack (I2): an ack dies with its own."""
    return (
        residency is not None
        and residency.state == "acked"
        and replica.state == "joined"
        and replica.incarnation is not None
        and residency.incarnation == replica.incarnation
    )


def judge(
    run: RunRow,
    live: Collection[ReplicaRow],
    residency: Mapping[str, ResidencyRow],
    elapsed: Elapsed,
) -> Verdict:
    """Decide about the candidate of `run`.

    Args:
        run: whose rules of readiness apply.
        live: the replicas that are joined.
        residency: replica name -> what it last reported about the candidate.
        elapsed: what the observer has seen pass.
    """
    acked = sum(is_acked(r, residency.get(r.replica)) for r in live)
    rejected = [
        r.replica
        for r in live
        if (row := residency.get(r.replica)) is not None and row.state == "rejected"
    ]
    of_live = f"{acked} of {len(live)} live replicas"
    if live and acked == len(live):
        return Verdict("advance", f"acked by all {acked} live replicas")
    if live and len(rejected) == len(live):
        reason = residency[rejected[0]].reason
        return Verdict("withdraw", f"rejected by all {len(live)} live replicas: {reason}")
    if elapsed.grace_over and run.min_ready is not None and acked >= max(1, run.min_ready):
        return Verdict("advance", f"acked by {of_live} within the grace")
    if elapsed.timed_out:
        return Verdict("withdraw", f"acked by {of_live} when its time was up")
    return Verdict("wait", f"acked by {of_live}")
