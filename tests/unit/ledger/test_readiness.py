"""Readiness: each rule of DESIGN.md as a row."""

from __future__ import annotations

import dataclasses

import pytest

from policyline.ledger.readiness import Elapsed, Verdict, judge
from policyline.ledger.rows import ReplicaRow, ResidencyRow, ResidencyState, RunRow

RUN = RunRow(
    run="r",
    line="l",
    state="open",
    epoch=1,
    holder=None,
    claimed_at="",
    max_staleness=4,
    min_ready=1,
    ready_grace_s=5,
    candidate_timeout_s=120,
    opened_seq=1,
    opened_at="",
    closed_seq=None,
    parent_run=None,
    parent_version=None,
)


def replica(name: str, incarnation: str | None = "i") -> ReplicaRow:
    return ReplicaRow("l", name, 1, "joined", incarnation, "", "", 6, 1, "")


def said(name: str, state: ResidencyState, incarnation: str = "i") -> ResidencyRow:
    return ResidencyRow("l", name, 7, state, 1, incarnation, "d", reason="why")


def verdict(
    states: dict[str, ResidencyRow | None],
    min_ready: int | None = 1,
    elapsed: Elapsed = Elapsed(),  # noqa: B008 - frozen
) -> Verdict:
    return judge(
        dataclasses.replace(RUN, min_ready=min_ready),
        [replica(name) for name in states],
        {name: row for name, row in states.items() if row is not None},
        elapsed,
    )


GRACE = Elapsed(grace_over=True)
TIMEOUT = Elapsed(timed_out=True)
ACK0, ACK1 = said("r0", "acked"), said("r1", "acked")
REJ0, REJ1 = said("r0", "rejected"), said("r1", "rejected")
OLD1 = said("r1", "acked", incarnation="before")


@pytest.mark.parametrize(
    ("states", "min_ready", "elapsed", "expected"),
    [
        ({}, 1, Elapsed(), "wait"),
        ({}, None, GRACE, "wait"),
        ({"r0": ACK0}, 1, Elapsed(), "advance"),
        ({"r0": ACK0, "r1": ACK1}, None, Elapsed(), "advance"),
        ({"r0": ACK0, "r1": None}, 1, Elapsed(), "wait"),
        ({"r0": ACK0, "r1": None}, 1, GRACE, "advance"),
        ({"r0": ACK0, "r1": None}, 2, GRACE, "wait"),
        ({"r0": ACK0, "r1": None}, None, GRACE, "wait"),
        ({"r0": ACK0, "r1": OLD1}, None, Elapsed(), "wait"),
        ({"r0": None, "r1": None}, 1, GRACE, "wait"),
        ({"r0": REJ0, "r1": None}, 1, GRACE, "wait"),
        ({"r0": REJ0, "r1": REJ1}, 1, Elapsed(), "withdraw"),
        ({"r0": REJ0, "r1": ACK1}, 1, Elapsed(), "wait"),
        ({"r0": REJ0, "r1": ACK1}, 1, GRACE, "advance"),
        ({"r0": None, "r1": None}, 1, TIMEOUT, "withdraw"),
        ({"r0": ACK0, "r1": None}, 2, TIMEOUT, "withdraw"),
        ({"r0": ACK0, "r1": ACK1}, 2, TIMEOUT, "advance"),
    ],
)
def test_verdicts(
    states: dict[str, ResidencyRow | None],
    min_ready: int | None,
    elapsed: Elapsed,
    expected: str,
) -> None:
    assert verdict(states, min_ready, elapsed).outcome == expected


def test_a_withdrawal_names_the_reason_of_the_rejection() -> None:
    found = verdict({"r0": REJ0})
    assert found.outcome == "withdraw"
    assert "why" in found.reason


def test_an_unknown_incarnation_acks_nothing() -> None:
    found = judge(RUN, [replica("r0", incarnation=None)], {"r0": ACK0}, Elapsed())
    assert found.outcome == "wait"
