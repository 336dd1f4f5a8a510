"""Silence, grace and timeout, on the observer's own clock."""

from __future__ import annotations

from collections.abc import Mapping

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.readiness import Elapsed
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, ResidencyState, RunRow
from policyline.watcher.core.liveness import (
    CandidateTimer,
    Heartbeat,
    Heartbeats,
    due,
    note_heartbeats,
    silent,
    time_candidate,
)
from tests.unit.watcher.builders import INCARNATION, LINE

TTL_S = 15.0
GAP_S = 7.5
GRACE_S, TIMEOUT_S = 5.0, 120.0


def view(
    candidate: int | None = 3,
    reported: Mapping[str, ResidencyState] | None = None,
    *,
    min_ready: int | None = 1,
    states: Mapping[str, str] | None = None,
) -> LineSnapshot:
    """Two joined replicas; `reported` is what they last reported about the candidate."""
    replicas = {
        name: ReplicaRow(
            line=LINE,
            replica=name,
            generation=1,
            state=state,  # type: ignore[arg-type] # a literal, written out below
            incarnation=INCARNATION,
            url="",
            build="",
            max_loras=6,
            joined_seq=1,
            joined_at="",
        )
        for name, state in (states or {"r0": "joined", "r1": "joined"}).items()
    }
    residency = {
        (name, candidate or 0): ResidencyRow(
            line=LINE,
            replica=name,
            version=candidate or 0,
            state=state,
            generation=1,
            incarnation=INCARNATION,
            digest="",
        )
        for name, state in (reported or {}).items()
    }
    run = RunRow(
        run="r",
        line=LINE,
        state="open",
        epoch=1,
        holder=None,
        claimed_at="",
        max_staleness=4,
        min_ready=min_ready,
        ready_grace_s=GRACE_S,
        candidate_timeout_s=TIMEOUT_S,
        opened_seq=1,
        opened_at="",
        closed_seq=None,
        parent_run=None,
        parent_version=None,
    )
    line = LineRow(line=LINE, open_run="r", candidate=candidate)
    return LineSnapshot("id", 1, line, run, (), replicas, residency)


def test_a_heart_that_stands_still_for_the_ttl_is_silent() -> None:
    heartbeats = Heartbeats()
    for now in (0.0, 5.0, 10.0, 14.9):
        heartbeats = note_heartbeats(heartbeats, {"r1": (1, 7)}, now, gap_s=GAP_S)
        assert silent(heartbeats, view(), now, me="r0", ttl_s=TTL_S) == {}

    heartbeats = note_heartbeats(heartbeats, {"r1": (1, 7)}, 15.0, gap_s=GAP_S)

    assert silent(heartbeats, view(), 15.0, me="r0", ttl_s=TTL_S) == {"r1": Heartbeat(1, 7, 0.0)}


def test_a_beat_or_a_new_generation_starts_anew() -> None:
    for moved in ((1, 8), (2, 0)):
        heartbeats = Heartbeats()
        for now in (0.0, 7.0, 14.0):
            heartbeats = note_heartbeats(heartbeats, {"r1": (1, 7)}, now, gap_s=GAP_S)
        heartbeats = note_heartbeats(heartbeats, {"r1": moved}, 16.0, gap_s=GAP_S)

        assert silent(heartbeats, view(), 16.0, me="r0", ttl_s=TTL_S) == {}


def test_after_a_gap_nobody_is_silent() -> None:
    """While the ledger was away nobody could beat."""
    heartbeats = note_heartbeats(Heartbeats(), {"r1": (1, 7)}, 0.0, gap_s=GAP_S)
    heartbeats = note_heartbeats(heartbeats, {"r1": (1, 7)}, 60.0, gap_s=GAP_S)

    assert silent(heartbeats, view(), 60.0, me="r0", ttl_s=TTL_S) == {}


def test_oneself_those_who_left_and_former_generations_are_not_lost() -> None:
    heartbeats = Heartbeats()
    for now in (0.0, 7.0, 14.0, 20.0):
        heartbeats = note_heartbeats(
            heartbeats, {"r0": (1, 1), "r1": (1, 1), "r2": (9, 1)}, now, gap_s=GAP_S
        )
    seen = view(states={"r0": "joined", "r1": "left", "r2": "joined"})

    assert silent(heartbeats, seen, 20.0, me="r0", ttl_s=TTL_S) == {}


def test_the_grace_counts_from_the_first_ack_that_was_seen() -> None:
    timer = time_candidate(None, view(), 0.0)
    assert due(timer, view(), 4.0) == (None, TIMEOUT_S)

    acked = view(reported={"r0": "acked"})
    timer = time_candidate(timer, acked, 10.0)

    assert timer == CandidateTimer(3, 0.0, 10.0)
    assert due(timer, acked, 14.0) == (None, 10.0 + GRACE_S)
    assert due(timer, acked, 15.0) == (Elapsed(grace_over=True), None)


def test_time_alone_settles_nothing_that_needs_more_acks() -> None:
    acked = view(reported={"r0": "acked"}, min_ready=2)

    assert due(CandidateTimer(3, 0.0, 0.0), acked, 50.0) == (None, TIMEOUT_S)


def test_an_ack_after_the_grace_settles_at_once() -> None:
    timer = CandidateTimer(3, 0.0, 0.0)

    verdict, _ = due(timer, view(reported={"r0": "acked", "r1": "failed"}), 60.0)

    assert verdict == Elapsed(grace_over=True)


def test_the_timeout_counts_from_the_naming() -> None:
    verdict, again = due(CandidateTimer(3, 0.0), view(), TIMEOUT_S)

    assert (verdict, again) == (Elapsed(timed_out=True), None)


def test_another_candidate_starts_anew() -> None:
    timer = time_candidate(CandidateTimer(3, 0.0, 1.0), view(candidate=4), 9.0)

    assert timer == CandidateTimer(4, 9.0)
    assert time_candidate(timer, view(candidate=None), 10.0) is None
