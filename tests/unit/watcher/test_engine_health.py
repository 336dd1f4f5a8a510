"""Pause, hang and silence: what the plan makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policyline.watcher.core import reconcile_state
from policyline.watcher.core.back_off import FailedAttempt
from policyline.watcher.core.model import Known, Limits, Unknown
from policyline.watcher.core.plan import plan
from policyline.watcher.core.reconcile_state import Hang, ReconcileState
from tests.unit.watcher.builders import INCARNATION, LIMITS, NOW, actions, desired, known, version

SERVED, NEW = version(1, "current", "acked"), version(2, "candidate")
WHAT = desired(SERVED, NEW)
SEEN = known([SERVED], local=[SERVED, NEW])
ALIVE = ReconcileState(alive_at_s=NOW)


def paused(observed: Known = SEEN, *, is_paused: bool | None = True) -> Known:
    return replace(observed, paused=is_paused)


class TestPause:
    def test_the_engine_is_made_to_match_the_ledger(self) -> None:
        wanted = replace(WHAT, paused=True)

        assert actions(wanted, paused(is_paused=False), ALIVE) == [("Pause", "")]
        assert actions(wanted, paused(), ALIVE) == []

    def test_while_paused_nothing_is_asked_that_needs_an_answer(self) -> None:
        """A scored request would hang; copies still come."""
        wanted = replace(desired(SERVED, NEW, version(3)), paused=True)
        state = replace(ALIVE, alive_at_s=0.0, idle_since_s={9: 0.0})

        found = plan(wanted, paused(), state, LIMITS, NOW)

        assert [type(a).__name__ for a in found.actions] == ["Fetch"]
        waiting = [("trl-policy-v2", "paused"), ("trl-policy-v3", "paused")]
        assert [(h.name, h.reason) for h in found.pending] == waiting
        assert "policyline ledger resume" in found.pending[0].why

    def test_what_we_paused_is_resumed_at_once(self) -> None:
        state = reconcile_state.paused(ALIVE, INCARNATION)
        state = reconcile_state.note(state, WHAT, paused(), NOW)

        assert actions(WHAT, paused(), state) == [("Resume", "")]

    def test_what_others_paused_is_resumed_after_a_poll_interval(self) -> None:
        state = reconcile_state.note(ALIVE, WHAT, paused(), NOW)
        found = plan(WHAT, paused(), state, LIMITS, NOW + 1)

        assert found.actions == ()
        assert found.wake_at_s == NOW + LIMITS.poll_interval_s
        assert actions(WHAT, paused(), state, now=found.wake_at_s) == [("Resume", "")]

    def test_short_pauses_of_others_do_not_add_up(self) -> None:
        state = reconcile_state.note(ALIVE, WHAT, paused(), NOW)
        state = reconcile_state.note(state, WHAT, paused(is_paused=False), NOW + 4)
        state = reconcile_state.note(state, WHAT, paused(), NOW + 6)

        assert state.paused_since_s == NOW + 6

    def test_a_pause_in_another_life_was_not_ours(self) -> None:
        state = reconcile_state.paused(ALIVE, "999.0")

        assert reconcile_state.note(state, WHAT, paused(), NOW).paused_here is None

    def test_without_the_routes_the_reason_is_shown_and_serving_goes_on(self) -> None:
        observed = replace(SEEN, pause_cause="no routes")

        found = plan(replace(WHAT, paused=True), observed, ALIVE, LIMITS, NOW)

        assert [type(a).__name__ for a in found.actions] == ["Load"]
        assert "no routes" in found.reasons[0]


class TestLife:
    def test_an_old_answer_is_renewed_and_a_doubt_comes_first(self) -> None:
        rested = desired(SERVED)
        due_s = NOW + LIMITS.probe_interval_s

        assert plan(rested, known([SERVED]), ALIVE, LIMITS, NOW).actions == ()
        assert actions(rested, known([SERVED]), ALIVE, now=due_s) == [("Prove", "")]
        doubted = reconcile_state.doubted(ALIVE, "EngineTimeout: load")
        assert actions(WHAT, SEEN, doubted) == [("Prove", ""), ("Load", "trl-policy-v2")]

    def test_an_unanswered_look_is_a_doubt_unless_the_engine_is_paused(self) -> None:
        seen = replace(SEEN, unanswered="is_paused")

        assert reconcile_state.note(ALIVE, WHAT, seen, NOW).doubt == "is_paused"
        assert reconcile_state.note(ALIVE, WHAT, replace(seen, paused=True), NOW).doubt == ""
        silent = Unknown("away", silent=True)
        assert reconcile_state.note(ALIVE, WHAT, silent, NOW).doubt == "away"

    def test_a_hang_voids_the_acks_and_makes_everything_pending(self) -> None:
        state = reconcile_state.hangs(
            ALIVE, INCARNATION, FailedAttempt("no answer", NOW, 0.0, 5.0), NOW - 30.0
        )
        found = plan(WHAT, SEEN, state, LIMITS, NOW)

        assert [type(a).__name__ for a in found.actions] == ["Announce"]
        assert found.actions[0].why == "the engine hangs: no answer"
        assert [(h.name, h.reason) for h in found.pending] == [("trl-policy-v2", "hung")]
        assert state.hang is not None
        assert found.wake_at_s == state.hang.not_before_s
        told = desired(SERVED, NEW, incarnation=None)
        assert actions(told, SEEN, state, now=found.wake_at_s) == [("Prove", "")]

    def test_an_answer_of_the_same_life_lets_the_acks_count_again_without_a_load(self) -> None:
        told = desired(SERVED, incarnation=None)
        state = reconcile_state.answered(replace(ALIVE, hang=Hang(INCARNATION, "x", 3, 0.0)), NOW)

        assert actions(told, known([SERVED]), state) == [("Announce", "")]
        lost = known([], local=[SERVED])
        assert actions(told, lost, state)[0] == ("ReportGone", "trl-policy-v1")

    @pytest.mark.parametrize(
        "seen", [known([SERVED], incarnation="2000.0"), paused(known([SERVED]))]
    )
    def test_another_life_and_a_pause_are_no_hang(self, seen: Known) -> None:
        state = replace(ALIVE, hang=Hang(INCARNATION, "x", 1, NOW + 9))

        assert reconcile_state.note(state, WHAT, seen, NOW).hang is None

    def test_hangs_back_off(self) -> None:
        state = ALIVE
        for _ in range(3):
            state = reconcile_state.hangs(
                state, INCARNATION, FailedAttempt("x", NOW, 0.0, 100.0), NOW
            )

        assert state.hang == Hang(INCARNATION, "x", 3, NOW + 0.4)


class TestSilence:
    limits = Limits(6, 2.0, 30.0, 5.0, silent_s=10.0)

    def test_acks_of_an_engine_that_says_nothing_for_long_are_void(self) -> None:
        silent = Unknown("EngineTimeout", silent=True)
        state = reconcile_state.note(ALIVE, WHAT, silent, NOW)
        state = reconcile_state.note(state, WHAT, silent, NOW + 9)

        assert actions(WHAT, silent, state, self.limits, NOW + 9) == []
        assert actions(WHAT, silent, state, self.limits, NOW + 10) == [("Announce", "")]

    def test_one_that_answers_with_an_error_is_not_silent(self) -> None:
        faulty = Unknown("EngineFault")
        state = reconcile_state.note(ALIVE, WHAT, faulty, NOW)

        assert actions(WHAT, faulty, state, self.limits, NOW + 1000) == []
