"""What happens in the life of a fleet, which single steps would seldom add up to; and all rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from policyline.ledger import Claim, Membership, Reservation, RunSettings
from tests.simulation.ledger.harness import ACTORS, Harness
from tests.simulation.ledger.publishers import Publishers, actors, lines, rules
from tests.simulation.ledger.watchers import Watchers

Story = Callable[["LedgerMachine", str], None]


def served(machine: LedgerMachine, line: str) -> None:
    machine.serve_the_candidate(line)


def served_by_one_and_the_other_leaves(machine: LedgerMachine, line: str) -> None:
    machine.serve_the_candidate(line, but="r1")
    machine.leave(machine.live_member(line, "r1"))


def served_by_one_and_the_other_is_lost(machine: LedgerMachine, line: str) -> None:
    silent = machine.live_member(line, "r1")
    machine.serve_the_candidate(line, but="r1")
    machine.declare_lost(silent, off=True)
    machine.declare_lost(silent, off=False)


def served_by_one_after_its_engine_died(machine: LedgerMachine, line: str) -> None:
    machine.serve_the_candidate(line, but="r0")
    machine.change_incarnation(machine.live_member(line, "r1"), "new")
    machine.serve_the_candidate(line)


def served_while_one_is_away_for_a_moment(machine: LedgerMachine, line: str) -> None:
    away = machine.live_member(line, "r1")
    machine.ack_the_candidate(away)
    machine.change_incarnation(away, "none")
    machine.ack_the_candidate(machine.live_member(line, "r0"))
    machine.change_incarnation(away, "same")


def served_and_a_watcher_comes_back(machine: LedgerMachine, line: str) -> None:
    machine.serve_the_candidate(line)
    machine.leave(machine.live_member(line, "r0"))
    machine.joined(line, "r0", "same")


def served_by_one_within_the_grace(machine: LedgerMachine, line: str) -> None:
    machine.serve_the_candidate(line, but="r1")
    machine.settle(line, off=False, grace_over=True, timed_out=False)


def not_served_in_time(machine: LedgerMachine, line: str) -> None:
    machine.settle(line, off=False, grace_over=True, timed_out=True)


def rejected(machine: LedgerMachine, line: str) -> None:
    candidate = machine.model.line(line).candidate or 1
    for name in ("r0", "r1"):
        machine.load_failed(machine.live_member(line, name), candidate, permanent=True)


def rolled_back(machine: LedgerMachine, line: str) -> None:
    machine.serve_the_candidate(line)
    former = machine.model.window(machine.model.line(line))
    machine.roll_back(line, former[-1] if former else 1)


def followed_by_a_hole(machine: LedgerMachine, line: str) -> None:
    claim = machine.present_claim(line, ACTORS[0])
    for offset in (2, -2, -1):
        machine.steps += 1
        machine.reserve(claim, ACTORS[0], 100 + machine.steps, offset)


def overtaken(machine: LedgerMachine, line: str) -> None:
    """A number that is published after a greater one has become current."""
    machine.serve_the_candidate(line)
    late = machine.reserve_next(machine.present_claim(line, ACTORS[0]))
    machine.train_a_step(line, ACTORS[0])
    machine.serve_the_candidate(line)
    machine.publish(late, None, "b")
    machine.serve_the_candidate(line)


def fenced_and_finished_by_the_successor(machine: LedgerMachine, line: str) -> None:
    claim = machine.present_claim(line, ACTORS[0])
    begun = machine.reserve_next(claim)
    machine.open_run(claim.run, line, ACTORS[1], RunSettings(2), None, take_over=True)
    machine.publish(begun, claim, "a")
    machine.reserve(claim, ACTORS[0], 1, None)
    machine.publish(begun, machine.present_claim(line, ACTORS[1]), "a")


def asked_for_twice(machine: LedgerMachine, line: str) -> None:
    claim = machine.present_claim(line, ACTORS[0])
    for _ in range(2):
        machine.reserve(claim, ACTORS[0], 99, None)


def published_again(machine: LedgerMachine, line: str) -> None:
    """The reply was lost, say."""
    machine.publish(machine.train_a_step(line, ACTORS[0]), None, "a")


STORIES: tuple[Story, ...] = (
    served,
    served,
    served_by_one_and_the_other_leaves,
    served_by_one_and_the_other_is_lost,
    served_by_one_after_its_engine_died,
    served_while_one_is_away_for_a_moment,
    served_and_a_watcher_comes_back,
    served_by_one_within_the_grace,
    not_served_in_time,
    rejected,
    rolled_back,
    followed_by_a_hole,
    published_again,
    overtaken,
    fenced_and_finished_by_the_successor,
    asked_for_twice,
)
stories = st.lists(st.sampled_from(STORIES), min_size=1, max_size=3)


class LedgerMachine(Publishers, Watchers):
    """Every rule. A subclass says with `place` where its databases are."""

    reservations = Harness.reservations

    @rule(told=stories, line=lines, actor=actors, settings=rules)
    def tell(self, told: list[Story], line: str, actor: str, settings: RunSettings) -> None:
        for story in told:
            for name in ("r0", "r1"):
                self.live_member(line, name)
            self.train_a_step(line, actor, settings)
            story(self, line)

    @rule(told=stories, line=lines, actor=actors, settings=rules)
    def tell_more(self, told: list[Story], line: str, actor: str, settings: RunSettings) -> None:
        """Again, because hypothesis leaves out some rules in each example."""
        self.tell(told, line, actor, settings)

    def live_member(self, line: str, replica: str) -> Membership:
        there = self.model.line(line).replicas.get(replica)
        if there is None or there.state != "joined" or there.incarnation is None:
            return self.joined(line, replica, "same")
        return Membership(line, replica, there.generation)

    def present_claim(self, line: str, actor: str, settings: RunSettings | None = None) -> Claim:
        name = self.model.line(line).open_run
        if name is None or self.model.runs[name].holder is None:
            name = name or f"run{len(self.model.runs)}"
            self.open_run(name, line, actor, settings or RunSettings(2), None, take_over=True)
        return Claim(line, name, self.model.runs[name].epoch)

    def train_a_step(
        self, line: str, actor: str, settings: RunSettings | None = None
    ) -> Reservation:
        """As a trainer does it: with a claim that holds, the next number, and at once."""
        reservation = self.reserve_next(self.present_claim(line, actor, settings))
        self.publish(reservation, None, "a")
        return reservation

    def reserve_next(self, claim: Claim) -> Reservation:
        self.steps += 1
        reservation: Any = self.reserve(claim, ACTORS[0], 100 + self.steps, None)
        assert isinstance(reservation, Reservation)
        return reservation

    def serve_the_candidate(self, line: str, but: str = "") -> None:
        """As the fleet does it, perhaps without one replica."""
        row = self.model.line(line)
        candidate = row.candidate
        for name in row.live():
            replica = row.replicas[name]
            if candidate is not None and name != but and replica.incarnation is not None:
                member = Membership(line, name, replica.generation)
                self.fetched(member, candidate)
                self.ack(member, candidate, "")
