"""Back-off, suspicion and the times since when something is so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policyline.watcher.core import reconcile_state
from policyline.watcher.core.back_off import FIRST_DELAY_S, BackOff, FailedAttempt, next_delay_s
from policyline.watcher.core.model import Unknown
from policyline.watcher.core.reconcile_state import ReconcileState
from tests.unit.watcher.builders import INCARNATION, NOW, desired, known, version

CAP_S = 5.0
CHANCES = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 10_000), CHANCES)
def test_a_delay_is_positive_and_capped(attempts: int, chance: float) -> None:
    assert 0 < next_delay_s(attempts, chance, CAP_S) <= CAP_S


@given(st.integers(1, 10_000), CHANCES)
def test_delays_never_shrink_for_the_same_chance(attempts: int, chance: float) -> None:
    assert next_delay_s(attempts, chance, CAP_S) <= next_delay_s(attempts + 1, chance, CAP_S)


def test_the_first_delays_double_and_vary_by_half() -> None:
    assert next_delay_s(1, 0.0, CAP_S) == FIRST_DELAY_S / 2
    assert next_delay_s(2, 0.0, CAP_S) == FIRST_DELAY_S
    assert next_delay_s(1, 1.0, CAP_S) == FIRST_DELAY_S


def _failure(now: float = NOW) -> FailedAttempt:
    return FailedAttempt("cause", now, 1.0, CAP_S)


def test_failures_of_one_version_add_up_and_end_with_success() -> None:
    state = reconcile_state.version_failed(ReconcileState(), 1, _failure())
    state = reconcile_state.version_failed(state, 1, _failure())
    state = reconcile_state.version_failed(state, 2, _failure())

    assert state.back_offs[1] == BackOff(2, NOW + 2 * FIRST_DELAY_S, "cause")
    assert reconcile_state.version_done(state, 1).back_offs.keys() == {2}


def test_failed_turns_add_up_until_one_is_done() -> None:
    state = reconcile_state.pass_failed(
        reconcile_state.pass_failed(ReconcileState(), _failure()), _failure()
    )

    assert (state.failures, state.observe_again_s) == (2, NOW + 2 * FIRST_DELAY_S)
    assert reconcile_state.pass_done(state) == ReconcileState()


class TestSuspect:
    broken = reconcile_state.engine_broke(ReconcileState(), 1, INCARNATION)
    what = desired(version(1, "candidate"))

    def test_another_incarnation_makes_it_a_death(self) -> None:
        state = reconcile_state.note(self.broken, self.what, known(incarnation="2000.0"), NOW)

        assert (state.deaths, state.suspect) == ({1: 1}, None)

    def test_the_same_incarnation_proves_nothing(self) -> None:
        """A dead engine still answers for a moment."""
        state = reconcile_state.note(self.broken, self.what, known(), NOW)

        assert (state.deaths, state.suspect) == ({}, self.broken.suspect)

    def test_nothing_is_judged_while_the_engine_is_unknown(self) -> None:
        state = reconcile_state.note(self.broken, self.what, Unknown("away"), NOW)

        assert state.suspect is not None

    def test_a_version_that_is_served_is_innocent(self) -> None:
        state = reconcile_state.note(self.broken, self.what, known(incarnation="2000.0"), NOW)

        assert reconcile_state.version_done(state, 1).deaths == {}
        assert reconcile_state.version_done(self.broken, 1).suspect is None
        assert reconcile_state.version_done(self.broken, 2).suspect is not None


class TestSince:
    def test_out_of_window_counts_from_the_first_observation(self) -> None:
        out_of_window = version(1, None, "acked")
        state = reconcile_state.note(
            ReconcileState(), desired(out_of_window), known([out_of_window]), NOW
        )
        state = reconcile_state.note(state, desired(out_of_window), known([out_of_window]), NOW + 9)

        assert state.out_of_window_since_s == {1: NOW}

    def test_a_version_that_is_wanted_again_starts_anew(self) -> None:
        out_of_window = version(1, None, "acked")
        state = reconcile_state.note(
            ReconcileState(), desired(out_of_window), known([out_of_window]), NOW
        )
        back = version(1, "pinned", "acked")

        assert (
            reconcile_state.note(state, desired(back), known([back]), NOW).out_of_window_since_s
            == {}
        )

    def test_idle_needs_an_engine_that_tells_of_requests(self) -> None:
        out_of_window = version(1, None, "evicted")
        what = desired(out_of_window)

        def idle(busy: frozenset[str] | None) -> object:
            observed = known(local=[out_of_window], busy=busy)
            return reconcile_state.note(ReconcileState(), what, observed, NOW).idle_since_s

        assert idle(frozenset()) == {1: NOW}
        assert idle(frozenset({out_of_window.name})) == {}
        assert idle(None) == {}

    def test_a_gap_in_what_is_known_ends_idleness(self) -> None:
        out_of_window = version(1, None, "evicted")
        what = desired(out_of_window)
        state = reconcile_state.note(ReconcileState(), what, known(local=[out_of_window]), NOW)

        assert reconcile_state.note(state, what, Unknown("away"), NOW + 1).idle_since_s == {}

    def test_what_is_nowhere_any_more_is_forgotten(self) -> None:
        state = ReconcileState(back_offs={7: BackOff(1, NOW, "x")}, deaths={7: 1})

        assert reconcile_state.note(state, desired(), known(), NOW) == ReconcileState(
            alive_at_s=NOW
        )

    def test_reports_are_of_one_incarnation(self) -> None:
        state = reconcile_state.foreign_reported(ReconcileState(), INCARNATION, "n", "/p")

        assert reconcile_state.note(state, desired(), known(), NOW).reported
        assert not reconcile_state.note(state, desired(), known(incarnation="2"), NOW).reported
