"""The plan, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policyline.watcher.core.back_off import BackOff
from policyline.watcher.core.model import (
    Ack,
    Announce,
    Fetch,
    Free,
    Load,
    Pause,
    Prove,
    ReportGone,
    Unknown,
    Unload,
)
from policyline.watcher.core.plan import must_observe, plan
from policyline.watcher.core.reconcile_state import ReconcileState
from tests.unit.watcher.builders import (
    INCARNATION,
    LIMITS,
    NOW,
    actions,
    desired,
    known,
    path,
    version,
)

V1, V2, V3 = "trl-policy-v1", "trl-policy-v2", "trl-policy-v3"
AWAY = Unknown("EngineTimeout: no answer")
ALIVE = ReconcileState(alive_at_s=NOW)


def test_nothing_is_planned_when_all_is_served() -> None:
    served = [version(2, "current", "acked"), version(1, "window", "acked")]

    found = plan(desired(*served), known(served), ReconcileState(), LIMITS, NOW)

    assert ((), NOW + LIMITS.poll_interval_s) == (found.actions, found.wake_at_s)


def test_a_new_version_is_fetched_then_loaded() -> None:
    new = version(1, "candidate")

    assert actions(desired(new), known()) == [("Fetch", V1), ("Load", V1)]
    assert actions(desired(new), known(local=[new])) == [("Load", V1)]


def test_current_comes_first_then_the_order_of_the_ledger() -> None:
    wanted = [version(2, "current"), version(3, "candidate"), version(1, "window")]

    found = actions(desired(*wanted), known(local=wanted))

    assert found == [("Load", V2), ("Load", V3), ("Load", V1)]


def test_what_the_engine_lists_without_an_ack_is_acked_without_a_load() -> None:
    pending = version(1, "current", "fetched")

    assert actions(desired(pending), known([pending])) == [("Ack", V1)]


def test_an_ack_of_a_former_incarnation_counts_for_nothing() -> None:
    old = version(1, "current", "acked", incarnation="999.0")

    assert actions(desired(old), known(local=[old])) == [("Load", V1)]


def test_a_new_incarnation_is_announced_before_anything_else() -> None:
    old = version(1, "current", "acked", incarnation="999.0")

    found = actions(desired(old, incarnation="999.0"), known(local=[old]))

    assert found == [("Announce", "")]


def test_an_acked_version_that_the_engine_lost_is_taken_back_first() -> None:
    lost, new = version(1, "current", "acked"), version(2, "candidate")

    found = actions(desired(lost, new), known(local=[lost, new]))

    assert found[0] == ("ReportGone", V1)


def test_stale_acks_are_taken_back_before_the_incarnation_is_announced() -> None:
    lost = version(1, "current", "acked")

    found = actions(desired(lost, incarnation=None), known(local=[lost]))

    assert found == [("ReportGone", V1), ("Announce", "")]


def test_files_that_vanished_under_a_served_version_are_fetched_again() -> None:
    served = version(1, "current", "acked")

    found = plan(desired(served), known([served], local=[]), ReconcileState(), LIMITS, NOW)

    assert [getattr(a, "restores", None) for a in found.actions] == [True]


class TestUnknown:
    def test_an_unknown_engine_plans_nothing(self) -> None:
        found = actions(desired(version(1, "current"), version(2, None)), AWAY)

        assert found == []

    def test_an_unknown_ledger_plans_nothing(self) -> None:
        found = actions(Unknown("LedgerUnavailable"), known([version(1)]))

        assert found == []

    def test_an_engine_that_is_gone_loses_its_acks(self) -> None:
        gone = Unknown("EngineUnreachable", gone=True)

        assert actions(desired(), gone) == [("Announce", "")]
        assert actions(desired(incarnation=None), gone) == []

    def test_it_looks_again_after_the_back_off(self) -> None:
        state = ReconcileState(failures=1, observe_again_s=NOW + 0.3)

        assert plan(desired(), AWAY, state, LIMITS, NOW).wake_at_s == NOW + 0.3


class TestEviction:
    def test_a_version_out_of_the_window_lingers_then_goes(self) -> None:
        out_of_window = version(1, None, "acked")
        state = ReconcileState(out_of_window_since_s={1: NOW})

        found = plan(desired(out_of_window), known([out_of_window]), state, LIMITS, NOW)

        assert ((), NOW + LIMITS.linger_s) == (found.actions, found.wake_at_s)
        later = NOW + LIMITS.linger_s
        assert actions(desired(out_of_window), known([out_of_window]), state, now=later) == [
            ("Unload", V1)
        ]

    def test_a_short_slot_does_not_wait_for_the_linger(self) -> None:
        window = [version(2, "current", "acked"), version(1, None, "acked")]
        new = version(3, "candidate")
        state = ReconcileState(out_of_window_since_s={1: NOW})
        limits = replace(LIMITS, max_loras=2)

        for local, steps in (([*window, new], ["Load"]), (window, ["Fetch", "Load"])):
            found = actions(desired(*window, new), known(window, local=local), state, limits)

            assert found == [("Unload", V1), *((step, V3) for step in steps)]

    def test_loads_come_before_evictions_when_there_is_room(self) -> None:
        out_of_window, new = version(1, None, "acked"), version(2, "candidate")
        state = ReconcileState(out_of_window_since_s={1: 0.0})

        found = actions(
            desired(out_of_window, new), known([out_of_window], local=[out_of_window, new]), state
        )

        assert found == [("Load", V2), ("Unload", V1)]

    def test_no_more_versions_are_served_than_there_are_slots(self) -> None:
        wanted = [version(n, "window") for n in (3, 2, 1)]
        limits = replace(LIMITS, max_loras=2)

        found = plan(desired(*wanted), known(local=wanted), ReconcileState(), limits, NOW)

        assert actions(desired(*wanted), known(local=wanted), limits=limits) == [
            ("Load", V3),
            ("Load", V2),
        ]
        assert found.reasons == (f"{V1} has no slot: max_loras is 2",)

    def test_a_rejected_version_leaves_the_engine_at_once(self) -> None:
        rejected = version(1, "candidate", "rejected")

        assert actions(desired(rejected), known([rejected])) == [("Unload", V1)]


class TestLocalFiles:
    out_of_window = (version(1, None, "evicted"), version(2, None, "evicted"), version(3, None))
    state = ReconcileState(idle_since_s={1: NOW, 2: NOW + 5, 3: NOW + 6})
    begin_s = NOW + LIMITS.grace_s + LIMITS.poll_interval_s

    def test_they_stay_for_the_grace_and_a_poll_interval(self) -> None:
        what, observed = desired(*self.out_of_window), known(local=self.out_of_window)

        found = plan(what, observed, self.state, LIMITS, self.begin_s - 1)

        assert (found.actions, found.wake_at_s) == ((), self.begin_s)

    def test_then_all_go_whose_grace_is_over(self) -> None:
        what, observed = desired(*self.out_of_window), known(local=self.out_of_window)

        found = actions(what, observed, self.state, now=self.begin_s)

        assert found == [("DeleteLocal", V1), ("DeleteLocal", V2)]


class TestForeign:
    @pytest.mark.parametrize("in_ledger", [True, False])
    def test_it_is_reported_once_and_blocks_its_version(self, *, in_ledger: bool) -> None:
        ours, other = version(1, "current"), version(2, "candidate")
        what = desired(ours, other) if in_ledger else desired(other)
        observed = known(local=[ours, other], foreign={V1: "/elsewhere/v1"})

        assert actions(what, observed) == [("ReportForeign", V1), ("Load", V2)]
        state = ReconcileState(reported=frozenset({(INCARNATION, V1, "/elsewhere/v1")}))
        assert actions(what, observed, state) == [("Load", V2)]

    def test_names_of_others_are_none_of_our_business(self) -> None:
        assert actions(desired(), known(foreign={"sql-lora": "/a", "trl-policy-v01": "/b"})) == []

    def test_take_over_removes_it_when_it_is_idle(self) -> None:
        state = ReconcileState(reported=frozenset({(INCARNATION, V1, "/x")}))
        limits = replace(LIMITS, take_over=True)
        what = desired(version(1, "current"))

        idle = known(foreign={V1: "/x"})
        assert actions(what, idle, state, limits) == [("RemoveForeign", V1)]
        for busy in (frozenset({V1}), None):
            occupied = known(foreign={V1: "/x"}, busy=busy)
            assert actions(what, occupied, state, limits) == []

    def test_a_version_of_ours_at_another_path_is_foreign_too(self) -> None:
        acked = version(1, "current", "acked")

        found = actions(desired(acked), known(local=[acked], foreign={V1: path(acked) + "/"}))

        assert found == [("ReportGone", V1), ("ReportForeign", V1)]


class TestBackOff:
    def test_a_version_in_back_off_waits_and_the_next_goes_on(self) -> None:
        bad, good = version(2, "current"), version(1, "window")
        state = ReconcileState(back_offs={2: BackOff(3, NOW + 1.5, "ContentMismatch")})

        found = plan(desired(bad, good), known(local=[bad, good]), state, LIMITS, NOW)

        assert actions(desired(bad, good), known(local=[bad, good]), state) == [("Load", V1)]
        assert found.wake_at_s == NOW + 1.5
        assert "3 failed attempts: ContentMismatch" in found.reasons[0]

    def test_a_rejected_version_is_not_tried_again(self) -> None:
        rejected = version(1, "candidate", "rejected")

        assert actions(desired(rejected), known(local=[rejected])) == []

    def test_two_deaths_of_the_engine_are_enough(self) -> None:
        deadly = version(1, "candidate")

        for deaths, expected in ((1, "Load"), (2, "Reject")):
            state = ReconcileState(deaths={1: deaths})
            assert [(expected, V1)] == actions(desired(deadly), known(local=[deadly]), state)


class TestFreshness:
    """How far one observation carries a plan."""

    new, old = version(2, "current"), version(1, None, "acked")

    def test_a_copy_is_followed_by_its_load_on_the_same_observation(self) -> None:
        fetch, load = plan(desired(self.new), known(), ALIVE, LIMITS, NOW).actions

        assert (type(fetch), type(load)) == (Fetch, Load)
        assert not must_observe(after=fetch, age_s=0.5)

    def test_an_old_observation_carries_nothing(self) -> None:
        assert must_observe(after=Fetch(self.new, ""), age_s=1.1)

    def test_what_leaves_the_rest_of_the_plan_true_is_followed_by_it(self) -> None:
        for action in (Unload(self.old, ""), Free(self.old, 7, ""), ReportGone(self.old, "")):
            assert not must_observe(after=action, age_s=0.0)

    def test_after_a_version_came_or_the_engine_changed_it_is_observed(self) -> None:
        """I8: the next version may have come meanwhile and goes first."""
        changes = (Load(self.new, ""), Ack(self.new, ""), Announce("9.0", ""), Prove(""), Pause(""))

        assert all(must_observe(after=action, age_s=0.0) for action in changes)
