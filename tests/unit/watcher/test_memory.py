"""Back-off, suspicion and the times since when something is so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policyline.watcher.core import memory as remember
from policyline.watcher.core.memory import FIRST_DELAY_S, Failure, next_delay_s
from policyline.watcher.core.model import Memory, Trouble, Unknown
from tests.unit.watcher.builders import LIFE, NOW, desired, known, version

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


def _failure(now: float = NOW) -> Failure:
    return Failure("cause", now, 1.0, CAP_S)


def test_failures_of_one_version_add_up_and_end_with_success() -> None:
    memory = remember.version_failed(Memory(), 1, _failure())
    memory = remember.version_failed(memory, 1, _failure())
    memory = remember.version_failed(memory, 2, _failure())

    assert memory.troubles[1] == Trouble(2, NOW + 2 * FIRST_DELAY_S, "cause")
    assert remember.version_done(memory, 1).troubles.keys() == {2}


def test_failed_turns_add_up_until_one_is_done() -> None:
    memory = remember.turn_failed(remember.turn_failed(Memory(), _failure()), _failure())

    assert (memory.failures, memory.look_again_s) == (2, NOW + 2 * FIRST_DELAY_S)
    assert remember.turn_done(memory) == Memory()


class TestSuspect:
    broken = remember.engine_broke(Memory(), 1, LIFE)
    what = desired(version(1, "candidate"))

    def test_another_incarnation_makes_it_a_death(self) -> None:
        memory = remember.note(self.broken, self.what, known(incarnation="2000.0"), NOW)

        assert (memory.deaths, memory.suspect) == ({1: 1}, None)

    def test_the_same_incarnation_proves_nothing(self) -> None:
        """A dead engine still answers for a moment."""
        memory = remember.note(self.broken, self.what, known(), NOW)

        assert (memory.deaths, memory.suspect) == ({}, self.broken.suspect)

    def test_nothing_is_judged_while_the_engine_is_unknown(self) -> None:
        memory = remember.note(self.broken, self.what, Unknown("away"), NOW)

        assert memory.suspect is not None

    def test_a_version_that_is_served_is_innocent(self) -> None:
        memory = remember.note(self.broken, self.what, known(incarnation="2000.0"), NOW)

        assert remember.version_done(memory, 1).deaths == {}
        assert remember.version_done(self.broken, 1).suspect is None
        assert remember.version_done(self.broken, 2).suspect is not None


class TestSince:
    def test_outside_counts_from_the_first_look(self) -> None:
        outside = version(1, None, "acked")
        memory = remember.note(Memory(), desired(outside), known([outside]), NOW)
        memory = remember.note(memory, desired(outside), known([outside]), NOW + 9)

        assert memory.outside_since_s == {1: NOW}

    def test_a_version_that_is_wanted_again_starts_anew(self) -> None:
        outside = version(1, None, "acked")
        memory = remember.note(Memory(), desired(outside), known([outside]), NOW)
        back = version(1, "pinned", "acked")

        assert remember.note(memory, desired(back), known([back]), NOW).outside_since_s == {}

    def test_idle_needs_an_engine_that_tells_of_requests(self) -> None:
        outside = version(1, None, "evicted")
        what = desired(outside)

        def idle(busy: frozenset[str] | None) -> object:
            observed = known(local=[outside], busy=busy)
            return remember.note(Memory(), what, observed, NOW).idle_since_s

        assert idle(frozenset()) == {1: NOW}
        assert idle(frozenset({outside.name})) == {}
        assert idle(None) == {}

    def test_a_gap_in_what_is_known_ends_idleness(self) -> None:
        outside = version(1, None, "evicted")
        what = desired(outside)
        memory = remember.note(Memory(), what, known(local=[outside]), NOW)

        assert remember.note(memory, what, Unknown("away"), NOW + 1).idle_since_s == {}

    def test_what_is_nowhere_any_more_is_forgotten(self) -> None:
        memory = Memory(troubles={7: Trouble(1, NOW, "x")}, deaths={7: 1})

        assert remember.note(memory, desired(), known(), NOW) == Memory(alive_at_s=NOW)

    def test_reports_are_of_one_incarnation(self) -> None:
        memory = remember.foreign_reported(Memory(), LIFE, "n", "/p")

        assert remember.note(memory, desired(), known(), NOW).reported
        assert not remember.note(memory, desired(), known(incarnation="2"), NOW).reported
