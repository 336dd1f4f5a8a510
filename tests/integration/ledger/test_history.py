"""Replay, audit, verify: I7, and whether tampering is found."""

from __future__ import annotations

import pytest

from policyline.ledger import EngineFacts, Ledger, checkpoint, transfer
from policyline.ledger.append import unit_of_work
from policyline.ledger.errors import Corrupted, NotFound
from policyline.ledger.read.as_of import as_of
from policyline.ledger.read.audit import audit
from policyline.ledger.read.replay import replay, state_at
from policyline.ledger.read.verify import verify
from tests.behind_the_back import forge, run_sql
from tests.integration.ledger.test_queries import live, rollout
from tests.ledger_builders import FACTS, LINE, acknowledge, publish


@pytest.fixture
def lived(ledger: Ledger) -> Ledger:
    """A ledger with a bit of everything."""
    claim = ledger.open_run("r1")
    r0, r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    for _ in range(3):
        manifest = publish(ledger, claim)
        for member in (r0, r1):
            ledger.fetched(member, manifest.version, manifest.digest)
            acknowledge(ledger, member, manifest)
    ledger.evicted(r0, 1, digest=ledger.version(LINE, 1).digest or "", reason="outside")
    ledger.change_incarnation(r1, EngineFacts("2000.0", FACTS.build, 6))
    ledger.foreign_adapter_seen(r1, "trl-policy-v99", "/elsewhere", "not in this ledger")
    ledger.leave(r1, "SIGTERM")
    ledger.reject(claim, ledger.reserve(claim).version, "NaN")
    return ledger


def test_a_lived_ledger_adds_up(lived: Ledger) -> None:
    report = verify(lived)
    assert report.problems == ()
    assert report.events == report.head_seq == lived.head()[0]


def test_folding_the_first_n_events_gives_the_tables_as_they_stood_after_n(
    ledger: Ledger,
) -> None:
    """I7: the view taken after each append equals the replayed state at that event."""
    seen: dict[int, tuple[int | None, int | None, dict[str, tuple[int, ...]]]] = {}

    def note() -> None:
        view = ledger.view(LINE, also=range(1, 5))
        served = {
            name: tuple(v for v in range(1, 5) if name in view.acked_by(v))
            for name, row in view.replicas.items()
            if row.state == "joined"
        }
        seen[view.seq] = (view.current, view.candidate, served)

    claim = ledger.open_run("r1")
    note()
    r0, r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    for _ in range(4):
        manifest = publish(ledger, claim)
        note()
        for member in (r0, r1):
            acknowledge(ledger, member, manifest)
            note()
    ledger.change_incarnation(r0, EngineFacts("2.0"))
    note()
    for seq, (current, candidate, served) in seen.items():
        state = state_at(ledger, LINE, seq)
        assert (state.current, state.candidate, state.serving) == (current, candidate, served)


def test_replay_shows_a_runs_events_with_the_state_after_each(lived: Ledger) -> None:
    steps = [(e.kind, r.state().current) for e, r in replay(lived, "r1")]
    assert steps[0] == ("run_opened", None)
    assert [current for kind, current in steps if kind == "current_advanced"] == [1, 2, 3]
    assert len(steps) == lived.head()[0]
    some = [e.seq for e, _ in replay(lived, "r1", first=5, last=9)]
    assert some == [5, 6, 7, 8, 9]
    with pytest.raises(NotFound, match="nope"):
        next(replay(lived, "nope"))


def test_audit_tells_who_served_a_version_from_when_to_when(lived: Ledger) -> None:
    first = audit(lived, LINE, 1)
    assert [(s.replica, s.ended_by) for s in first.servings] == [
        ("r0", "version evicted"),
        ("r1", "incarnation changed"),
    ]
    third = audit(lived, LINE, 3)
    assert [(s.replica, s.ended_by) for s in third.servings] == [
        ("r0", None),
        ("r1", "incarnation changed"),
    ]
    with pytest.raises(NotFound, match="trl-policy-v77"):
        audit(lived, LINE, 77)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE events SET actor = 'someone' WHERE seq = 7", "event 7 was changed"),
        ("UPDATE events SET recorded_at = '2020' WHERE seq = 7", "event 7 was changed"),
        ("DELETE FROM events WHERE seq = 7", "event 7 is missing"),
        (
            "DELETE FROM events WHERE seq > (SELECT max(seq) - 2 FROM events)",
            "events were cut off",
        ),
        ("UPDATE lines SET current = 2", "current is 2, events give 3"),
        ("DELETE FROM residency WHERE version = 2", "projection residency lacks"),
        ("UPDATE replicas SET incarnation = 'x' WHERE replica = 'r0'", "incarnation is 'x'"),
        ("UPDATE rollouts SET version = 2 WHERE request = 'req-2'", "batch 'b1' were changed"),
        ("UPDATE rollouts SET prefill_s = 0.5 WHERE request = 'req-3'", "batch 'b2' were changed"),
        (
            "UPDATE rollouts SET staleness = 1 WHERE batch = 'b2'",
            "'b2' have another staleness",
        ),
        ("DELETE FROM rollouts WHERE request = 'req-1'", "batch 'b1' were changed"),
        ("DELETE FROM rollouts WHERE batch = 'b1'", "rollouts of batch 'b1' are missing"),
        ("DELETE FROM rollouts WHERE batch = 'b2'", "rollouts of batch 'b2' are missing"),
        (
            "UPDATE rollouts SET batch = 'b3' WHERE batch = 'b2'",
            "no event vouches",
        ),
        ("UPDATE rollouts SET line = 'other' WHERE batch = 'b1'", "batch 'b1' are missing"),
    ],
)
def test_every_kind_of_tampering_is_found(
    lived: Ledger, ledger_url: str, statement: str, expected: str
) -> None:
    lived.record_rollouts(LINE, "b1", [rollout(1, 1), rollout(2, 3)])
    lived.record_rollouts(LINE, "b2", [rollout(3, 3)])
    assert verify(lived).ok
    forge(ledger_url, statement)
    report = verify(lived)
    assert not report.ok
    assert expected in " | ".join(p.what for p in report.problems)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "UPDATE checkpoints SET state = replace(state, 'r0', 'r9') WHERE seq > 7",
            "checkpoint of line 'trl-policy' at event",
        ),
        ("UPDATE checkpoints SET state = '{'", "at event 7 is wrong"),
        ("UPDATE checkpoints SET seq = seq + 1000", "which there is not"),
        ("UPDATE checkpoints SET line = 'other'", "checkpoint of line 'other'"),
    ],
)
def test_a_wrong_checkpoint_is_found_and_mended(
    ledger: Ledger,
    ledger_url: str,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    expected: str,
) -> None:
    """Else as-of, which starts from one, would not tell the truth."""
    for module in (checkpoint, unit_of_work, transfer):
        monkeypatch.setattr(module, "CHECKPOINT_EVERY", 7)
    live(ledger, 4)
    assert verify(ledger).ok
    run_sql(ledger_url, statement)
    assert expected in " | ".join(p.what for p in verify(ledger).problems)
    transfer.repair_projections(ledger)
    assert verify(ledger).ok
    assert as_of(ledger, LINE, 10).current == state_at(ledger, LINE, 10).current


def test_a_checkpoint_that_cannot_be_read_has_a_remedy(
    ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checkpoint, unit_of_work):
        monkeypatch.setattr(module, "CHECKPOINT_EVERY", 7)
    live(ledger, 4)
    run_sql(ledger_url, "UPDATE checkpoints SET state = '{'")
    with pytest.raises(Corrupted, match="repair-projections"):
        as_of(ledger, LINE, 10)
