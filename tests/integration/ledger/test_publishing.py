"""Reserving and publishing: I1, I5 and I6 at the ledger."""

from __future__ import annotations

import pytest

from policyline.ledger import Ledger, RunSettings
from policyline.ledger.errors import Conflict, NotFound, Refused, StaleEpoch
from tests.ledger_builders import LINE, manifest_for, publish


def test_numbers_go_up_and_are_never_given_twice(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    assert [ledger.reserve(claim).version for _ in range(3)] == [1, 2, 3]
    ledger.release(claim)
    second = ledger.open_run("r2")
    assert ledger.reserve(second).version == 4


def test_an_attempt_that_asks_again_gets_its_number_again(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    first = ledger.reserve(claim, attempt="a1")
    assert ledger.reserve(claim, attempt="a1") == first
    assert ledger.reserve(claim, attempt="a2").version == 2


def test_a_named_number_leaves_a_hole_and_is_not_given_again(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    assert ledger.reserve(claim, version=10).version == 10
    assert ledger.reserve(claim).version == 11
    with pytest.raises(Conflict, match="trl-policy-v10 is taken"):
        ledger.reserve(claim, version=10)


def test_publishing_twice_is_one_event(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    manifest = manifest_for(ledger.reserve(claim))
    first = ledger.publish(claim, manifest, phases={"save": 0.5})
    head = ledger.head()
    assert ledger.publish(claim, manifest, phases={"save": 0.5}) == first
    assert ledger.head() == head
    assert [p.duration_s for p in ledger.phases(run="r1")] == [0.5]


def test_publishing_other_bytes_under_a_published_number_conflicts(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    reservation = ledger.reserve(claim)
    ledger.publish(claim, manifest_for(reservation, "one"))
    with pytest.raises(Conflict):
        ledger.publish(claim, manifest_for(reservation, "two"))
    digest = ledger.version(LINE, 1).digest
    assert digest == manifest_for(reservation, "one").digest


def test_a_version_nobody_reserved_is_refused(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    reservation = ledger.reserve(claim)
    ledger.reject(claim, reservation.version, "broken")
    with pytest.raises(Refused, match="not reserved"):
        ledger.publish(claim, manifest_for(reservation))


def test_a_stale_epoch_is_refused_and_told_who_holds_it(ledger_url: str, ledger: Ledger) -> None:
    old = ledger.open_run("r1")
    reservation = ledger.reserve(old)
    with Ledger(ledger_url, actor="other@there:9") as other:
        other.open_run("r1", take_over=True)
        head = ledger.head()
        for refused in (
            lambda: ledger.reserve(old),
            lambda: ledger.publish(old, manifest_for(reservation)),
            lambda: ledger.reject(old, reservation.version, "x"),
        ):
            with pytest.raises(StaleEpoch) as caught:
                refused()
            assert caught.value.holder == "other@there:9"
            assert "other@there:9" in str(caught.value)
        assert ledger.head() == head


def test_a_live_holder_is_not_replaced_by_accident(ledger_url: str, ledger: Ledger) -> None:
    ledger.open_run("r1")
    with Ledger(ledger_url, actor="other@there:9") as other:
        with pytest.raises(Refused, match=r"held by tester@here:1.*--take-over"):
            other.open_run("r1")
        with pytest.raises(Refused, match="held by"):
            other.open_run("r2")
        assert other.open_run("r1", take_over=True).epoch == 2


def test_opening_a_run_closes_the_former_in_the_same_event(ledger: Ledger) -> None:
    first = ledger.open_run("r1")
    publish(ledger, first)
    ledger.release(first)
    ledger.open_run("r2", settings=RunSettings(max_staleness=2))
    assert [(r.run, r.state, r.max_staleness) for r in ledger.runs()] == [
        ("r1", "closed", 4),
        ("r2", "open", 2),
    ]
    with pytest.raises(Refused, match="closed"):
        ledger.open_run("r1")
    with pytest.raises(StaleEpoch):
        ledger.reserve(first)


def test_an_unknown_parent_is_refused_and_nothing_is_opened(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="nope"):
        ledger.open_run("r1", parent_run="nope")
    assert ledger.runs() == []
    assert ledger.head()[0] == 0


def test_a_run_stays_on_its_line(ledger: Ledger) -> None:
    ledger.release(ledger.open_run("r1"))
    with pytest.raises(Refused, match="belongs to line"):
        ledger.open_run("r1", line="other")


def test_numbers_of_two_lines_do_not_touch(ledger: Ledger) -> None:
    one = ledger.open_run("r1")
    two = ledger.open_run("r2", line="other")
    assert (ledger.reserve(one).version, ledger.reserve(two).version) == (1, 1)
