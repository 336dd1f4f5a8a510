"""Readiness transitions: after an append, candidate and current move by events of their own."""

from __future__ import annotations

from policyline.ledger import events as kinds
from policyline.ledger.append.unit_of_work import UnitOfWork
from policyline.ledger.events import Event, NewEvent
from policyline.ledger.readiness import NOTHING_ELAPSED, Elapsed, judge
from policyline.ledger.rows import LineRow, RunRow

READINESS_KINDS = frozenset(
    {
        kinds.RUN_OPENED,
        kinds.VERSION_PUBLISHED,
        kinds.VERSION_WITHDRAWN,
        kinds.VERSION_ACKED,
        kinds.VERSION_LOAD_FAILED,
        kinds.REPLICA_JOINED,
        kinds.REPLICA_LEFT,
        kinds.REPLICA_LOST,
        kinds.INCARNATION_CHANGED,
    }
)
"""Only these can move candidate or current; no other needs the check."""


def follow(unit: UnitOfWork, line: str, actor: str, elapsed: Elapsed) -> list[Event]:
    """Append what follows until nothing more does. Ends, because each step uses up a candidate.

    Args:
        unit: the open transaction.
        line: the line concerned.
        actor: whose append it follows.
        elapsed: time that the observer saw pass for the present candidate.
    """
    appended: list[Event] = []
    while (new := _next(unit, line, actor, elapsed)) is not None:
        appended.append(unit.append(new))
        if new.kind != kinds.CANDIDATE_NAMED:
            elapsed = NOTHING_ELAPSED  # it was about the candidate that is gone now
    return appended


def _next(unit: UnitOfWork, line: str, actor: str, elapsed: Elapsed) -> NewEvent | None:
    row = unit.get(LineRow, (line,))
    run = unit.get(RunRow, (row.open_run,)) if row is not None and row.open_run else None
    if row is None or run is None:
        return None
    if row.candidate is None:
        return _name_candidate(unit, run, row.current or 0, actor)
    verdict = judge(run, unit.live_replicas(line), unit.residency(line, row.candidate), elapsed)
    if verdict.outcome == "wait":
        return None
    advances = verdict.outcome == "advance"
    kind = kinds.CURRENT_ADVANCED if advances else kinds.VERSION_WITHDRAWN
    return NewEvent(
        kind=kind,
        line=line,
        run=run.run,
        version=row.candidate,
        key=f"{kind}/{line}/{row.candidate}",
        actor=actor,
        payload={"reason": verdict.reason},
    )


def _name_candidate(unit: UnitOfWork, run: RunRow, current: int, actor: str) -> NewEvent | None:
    waiting = unit.waiting_versions(run.run)
    # one that was overtaken before it was published must not take the line back
    if not waiting or waiting[-1] < current:
        return None
    newest = waiting[-1]
    return NewEvent(
        kind=kinds.CANDIDATE_NAMED,
        line=run.line,
        run=run.run,
        version=newest,
        key=f"{kinds.CANDIDATE_NAMED}/{run.line}/{newest}",
        actor=actor,
        payload={"skipped": waiting[:-1]},
    )
