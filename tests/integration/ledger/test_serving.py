"""Acks, the window, candidate and current: I2, I4, I6 at the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policyline.ledger import EngineFacts, Ledger, Membership, RunSettings
from policyline.ledger.errors import NotFound, ProbeDisagrees, Refused, StaleGeneration
from policyline.ledger.read.verify import verify
from policyline.ledger.readiness import Elapsed
from tests.ledger_builders import FACTS, LINE, acknowledge, publish


def roles(ledger: Ledger) -> list[tuple[int, str]]:
    return [(d.version, d.role) for d in ledger.view(LINE).desired]


def test_a_version_becomes_current_when_all_live_replicas_have_acked(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    r0, r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    first = publish(ledger, claim)
    assert roles(ledger) == [(1, "candidate")]
    acknowledge(ledger, r0, first)
    assert ledger.view(LINE).current is None
    acknowledge(ledger, r1, first)
    assert roles(ledger) == [(1, "current")]
    assert ledger.view(LINE).acked_by(1) == ("r0", "r1")


def test_the_window_is_current_and_those_current_before_it(ledger: Ledger) -> None:
    claim = ledger.open_run("r1", settings=RunSettings(max_staleness=2))
    member = ledger.join(LINE, "r0", FACTS)
    for _ in range(4):
        acknowledge(ledger, member, publish(ledger, claim))
    publish(ledger, claim)
    assert roles(ledger) == [
        (4, "current"),
        (5, "candidate"),
        (3, "window"),
        (2, "window"),
    ]


def test_versions_published_meanwhile_are_skipped_and_marked(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    first = publish(ledger, claim)
    for _ in range(3):
        publish(ledger, claim)
    assert ledger.view(LINE).candidate == 1
    acknowledge(ledger, member, first)
    assert roles(ledger) == [(1, "current"), (4, "candidate")]
    assert [r.state for r in ledger.versions(run="r1")] == [
        "published",
        "skipped",
        "skipped",
        "published",
    ]
    assert "4" in ledger.version(LINE, 2).reason


def test_the_former_runs_current_is_served_until_the_new_run_has_one(ledger: Ledger) -> None:
    one = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    acknowledge(ledger, member, publish(ledger, one))
    ledger.release(one)
    two = ledger.open_run("r2")
    second = publish(ledger, two)
    assert roles(ledger) == [(1, "current"), (2, "candidate")]
    acknowledge(ledger, member, second)
    assert roles(ledger) == [(2, "current")]


def test_an_ack_dies_with_its_incarnation(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    first = publish(ledger, claim)
    acknowledge(ledger, member, first)
    ledger.change_incarnation(member, EngineFacts("2000.0", FACTS.build, 6))
    assert ledger.view(LINE).acked_by(1) == ()
    assert ledger.view(LINE).current == 1
    with pytest.raises(Refused, match=r"1000\.5"):
        acknowledge(ledger, member, first)
    acknowledge(ledger, member, first, incarnation="2000.0")
    assert ledger.view(LINE).acked_by(1) == ("r0",)


def test_an_ack_of_other_bytes_is_refused(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    publish(ledger, claim)
    with pytest.raises(Refused, match="not published with digest"):
        ledger.ack(member, 1, digest="0" * 64, incarnation="1000.5", build="b", probe=())
    with pytest.raises(Refused, match="not published"):
        ledger.ack(member, 9, digest="0" * 64, incarnation="1000.5", build="b", probe=())


def test_a_newer_watcher_fences_the_older_and_keeps_its_acks(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    old = ledger.join(LINE, "r0", FACTS)
    first = publish(ledger, claim)
    acknowledge(ledger, old, first)
    new = ledger.join(LINE, "r0", FACTS)
    assert new.generation == old.generation + 1
    assert ledger.view(LINE).acked_by(1) == ("r0",)
    with pytest.raises(StaleGeneration, match="own --replica"):
        acknowledge(ledger, old, first)
    with pytest.raises(StaleGeneration):
        ledger.beat(old, 1)


def test_the_dead_hold_nobody_back(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    live, silent = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    acknowledge(ledger, live, publish(ledger, claim))
    assert ledger.view(LINE).current is None
    assert ledger.declare_lost(
        LINE, "r1", generation=silent.generation, counter=0, reason="silent for 15 s"
    )
    assert ledger.view(LINE).current == 1


def test_one_that_beats_is_not_lost(ledger: Ledger) -> None:
    ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    ledger.beat(member, 1)
    assert not ledger.declare_lost(LINE, "r0", generation=1, counter=0, reason="silent")
    assert ledger.heartbeats(LINE) == {"r0": (1, 1)}
    assert ledger.declare_lost(LINE, "r0", generation=1, counter=1, reason="silent")
    with pytest.raises(StaleGeneration, match="lost"):
        ledger.beat(member, 2)


def test_leaving_is_said_once_and_lets_the_others_go_on(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    r0, r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    acknowledge(ledger, r0, publish(ledger, claim))
    ledger.leave(r1, "SIGTERM")
    head = ledger.head()
    ledger.leave(r1, "SIGTERM")
    assert ledger.view(LINE).current == 1
    assert ledger.head() == head


def test_grace_and_timeout_count_only_for_the_candidate_they_were_seen_for(
    ledger: Ledger,
) -> None:
    claim = ledger.open_run("r1")
    r0, _r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    acknowledge(ledger, r0, publish(ledger, claim))
    assert not ledger.settle(LINE, 9, Elapsed(grace_over=True))
    assert ledger.view(LINE).current is None
    assert ledger.settle(LINE, 1, Elapsed(grace_over=True))
    assert ledger.view(LINE).current == 1
    publish(ledger, claim)
    publish(ledger, claim)
    assert ledger.settle(LINE, 2, Elapsed(timed_out=True))
    assert ledger.version(LINE, 2).state == "withdrawn"
    assert ledger.view(LINE).candidate == 3


def test_a_candidate_that_everybody_rejects_is_withdrawn_and_the_next_one_named(
    ledger: Ledger,
) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    bad = publish(ledger, claim)
    good = publish(ledger, claim)
    ledger.load_failed(member, 1, digest=bad.digest, reason="rank 16 > 8", permanent=True)
    assert "rank 16 > 8" in ledger.version(LINE, 1).reason
    acknowledge(ledger, member, good)
    assert ledger.view(LINE).current == 2


def test_a_rejection_lasts_until_an_operator_has_it_tried_again(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    r0, r1, r2 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1", "r2"))
    made = publish(ledger, claim)
    acknowledge(ledger, r2, made)
    for member in (r0, r1):
        ledger.load_failed(member, 1, digest=made.digest, reason="bad disk", permanent=True)

    def said() -> list[tuple[str, int, str]]:
        return [(r.state, r.failures, r.reason) for r in ledger.residency(LINE)]

    acked, rejected, again = (
        ("acked", 0, ""),
        ("rejected", 1, "bad disk"),
        ("failed", 0, "bad disk"),
    )
    assert said() == [rejected, rejected, acked]
    assert ledger.retry(LINE, 1, replica="r2") == ()
    assert ledger.retry(LINE, 1, replica="r1") == ("r1",)
    assert said() == [rejected, again, acked]
    assert ledger.retry(LINE, 1) == ("r0",)
    head = ledger.head()
    assert ledger.retry(LINE, 1) == ()
    assert ledger.head() == head
    assert said() == [again, again, acked]
    assert ledger.view(LINE).acked_by(1) == ("r2",)
    acknowledge(ledger, r1, made)
    assert ledger.view(LINE).acked_by(1) == ("r1", "r2")
    assert [e.replica for e in ledger.events(kinds=["version_retried"])] == ["r1", "r0"]
    assert verify(ledger).ok


def test_only_what_a_replica_could_serve_is_tried_again(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    bad = publish(ledger, claim)
    ledger.load_failed(member, 1, digest=bad.digest, reason="rank 16 > 8", permanent=True)
    head = ledger.head()
    with pytest.raises(
        Refused, match=r"is withdrawn \(rejected by all .*publish the adapter again"
    ):
        ledger.retry(LINE, 1)
    with pytest.raises(NotFound, match="v2 is not published"):
        ledger.retry(LINE, 2)
    with pytest.raises(NotFound, match="replica 'r9' is not in this ledger"):
        ledger.retry(LINE, 1, replica="r9")
    assert ledger.head() == head


def test_pins_add_to_the_desired_set(ledger: Ledger) -> None:
    claim = ledger.open_run("r1", settings=RunSettings(max_staleness=0))
    member = ledger.join(LINE, "r0", FACTS)
    for _ in range(3):
        acknowledge(ledger, member, publish(ledger, claim))
    ledger.pin(LINE, 1, serve=True)
    ledger.pin(LINE, 2, serve=False)
    assert roles(ledger) == [(3, "current"), (1, "pinned")]
    ledger.unpin(LINE, 1)
    assert roles(ledger) == [(3, "current")]
    with pytest.raises(NotFound):
        ledger.pin(LINE, 9, serve=True)


def test_current_cannot_be_withdrawn_and_a_withdrawn_version_leaves_the_window(
    ledger: Ledger,
) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    for _ in range(2):
        acknowledge(ledger, member, publish(ledger, claim))
    with pytest.raises(Refused, match="is current"):
        ledger.withdraw(LINE, 2, "bad")
    ledger.withdraw(LINE, 1, "bad")
    assert roles(ledger) == [(2, "current")]


def test_a_probe_must_agree_with_the_first_of_its_build(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    r0, r1 = (ledger.join(LINE, name, FACTS) for name in ("r0", "r1"))
    first = publish(ledger, claim)

    def ack(member: Membership, probe: list[float], build: str = FACTS.build) -> None:
        digest, incarnation = first.digest, str(FACTS.incarnation)
        ledger.ack(
            member,
            first.version,
            digest=digest,
            incarnation=incarnation,
            build=build,
            probe=probe,
            tolerance=0.1,
        )

    ack(r1, [-1.25, -0.5])
    before = ledger.head()
    with pytest.raises(ProbeDisagrees, match=r"differs by 0\.25 from that of r1") as caught:
        ack(r0, [-1.25, -0.75])
    assert (caught.value.reference, caught.value.difference) == ("r1", 0.25)
    with pytest.raises(ProbeDisagrees, match="inf"):
        ack(r0, [-1.25])
    assert ledger.head() == before

    ack(r0, [-1.0, -0.75], "another build")
    ack(r0, [-1.2, -0.5])
    assert ledger.view(LINE).acked_by(first.version) == ("r0", "r1")


def test_a_view_for_one_replica_tells_its_own_and_the_candidates(ledger: Ledger) -> None:
    claim = ledger.open_run("r1", settings=RunSettings(ready_grace_s=60.0))
    members = [ledger.join(LINE, name, FACTS) for name in ("r0", "r1", "r2")]
    served, candidate = publish(ledger, claim), publish(ledger, claim)
    for member in members:
        acknowledge(ledger, member, served)
    for member in members[1:]:
        acknowledge(ledger, member, candidate)

    everything = ledger.view(LINE)
    own = ledger.view(LINE, replica="r0")

    assert everything.candidate == candidate.version
    assert set(own.residency) == {("r0", 1), ("r1", 2), ("r2", 2)}
    assert all(everything.residency[key] == row for key, row in own.residency.items())
    assert replace(own, residency=everything.residency) == everything


def test_a_second_copy_takes_no_ack_back(ledger: Ledger) -> None:
    """Nothing changed on the engine."""
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    first = publish(ledger, claim)
    acknowledge(ledger, member, first)
    ledger.fetched(member, 1, first.digest)
    assert ledger.view(LINE).acked_by(1) == ("r0",)


def test_a_candidate_that_is_current_is_a_candidate_no_more(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    acknowledge(ledger, member, publish(ledger, claim))
    assert (ledger.view(LINE).current, ledger.view(LINE).candidate) == (1, None)
