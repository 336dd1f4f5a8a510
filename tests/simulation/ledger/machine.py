"""Every verb of the ledger, in any order, with faults, against the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from ledger import Claim, EngineFacts, Ledger, Membership, Reservation, RunSettings
from ledger.asof import AsOf, as_of
from ledger.audit import audit
from ledger.errors import Corrupted, LedgerUnavailable, StaleEpoch
from ledger.events import GENESIS_HASH
from ledger.readiness import Elapsed
from ledger.replay import Replayer, state_at
from ledger.rollouts import NewRollout, RolloutFilter
from ledger.rows import VersionRow
from ledger.transfer import repair_projections
from ledger.verify import verify
from tests.behind_the_back import run_sql
from tests.ledger_builders import manifest_for
from tests.simulation.ledger.model import NOBODY, Line, Model, No

T = TypeVar("T")

LINES = ("trl-policy", "other")
ACTORS = ("one@there:1", "two@there:2")
"""On another host, so that the ledger must take both for alive."""
BREAK_COMMITS = {
    "sqlite": (
        "CREATE TRIGGER broken BEFORE UPDATE ON head BEGIN SELECT RAISE(ABORT, 'a test'); END",
    ),
    "postgresql": (
        """
        CREATE FUNCTION break_commit() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'a test'; END $$
        """,
        """
        CREATE TRIGGER broken BEFORE UPDATE ON head
        FOR EACH ROW EXECUTE FUNCTION break_commit()
        """,
    ),
}
MEND_COMMITS = {
    "sqlite": ("DROP TRIGGER broken",),
    "postgresql": ("DROP TRIGGER broken ON head", "DROP FUNCTION break_commit()"),
}
END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)

lines = st.sampled_from((LINES[0], LINES[0], LINES[0], LINES[1]))
runs = st.sampled_from(("r1", "r2", "r3"))
actors = st.sampled_from(ACTORS)
replicas = st.sampled_from(("r0", "r1"))
versions = st.integers(1, 8)
rarely = st.integers(0, 4).map(lambda n: n == 4)
rules = st.builds(
    RunSettings, max_staleness=st.integers(0, 2), min_ready=st.sampled_from((1, 2, None))
)


class ClockBroken(Exception):
    """Raised inside a transaction, after the lock was taken."""


@dataclass
class Process:
    """A replica's vLLM process: its incarnations never come back once another has been seen."""

    number: int = 0
    names: list[str] = field(default_factory=list)

    def present(self) -> str:
        return f"{1000 + self.number}.0"

    def restart(self) -> str:
        self.number += 1
        return self.present()


class LedgerMachine(RuleBasedStateMachine):
    """A subclass says with `place` how to make a fresh, upgraded database."""

    place: Callable[[], AbstractContextManager[str]]

    claims = Bundle("claims")
    reservations = Bundle("reservations")
    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self._place = type(self).place()
        self.url = self._place.__enter__()
        self.model = Model()
        self.now = datetime(2026, 1, 1, 12, tzinfo=UTC)
        self.clock_is_broken = False
        self.fault: Literal["", "commit", "clock", "connections"] = ""
        self.seen: tuple[int, str, str] = (0, GENESIS_HASH, "")
        self.digests: dict[tuple[str, int], str] = {}
        self.processes: dict[tuple[str, str], Process] = {}
        self.manifests: dict[tuple[str, int], str] = {}
        self.line = LINES[0]
        self.replayers: dict[str, Replayer] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.requests = 0
        self.steps = 0

    def teardown(self) -> None:
        try:
            if self.ledgers:
                self.check_everything()
        finally:
            self.close()
            self._place.__exit__(None, None, None)

    def close(self) -> None:
        for ledger in self.ledgers.values():
            ledger.close()
        self.ledgers.clear()

    def by(self, actor: str = ACTORS[0]) -> Ledger:
        if actor not in self.ledgers:
            self.ledgers[actor] = Ledger(self.url, actor=actor, clock=self.tell_time)
        return self.ledgers[actor]

    def tell_time(self) -> datetime:
        if self.clock_is_broken:
            raise ClockBroken
        return self.now

    # a verb, and what must come of it

    def both(self, real: Callable[[], T], model: Callable[[], Any]) -> tuple[T | None, Any]:
        """Do it in both; (None, None) when both refused."""
        try:
            wanted = model()
        except No as refusal:
            self.is_refused(real, refusal)
            return None, None
        return self.with_faults(real), wanted

    def is_refused(self, real: Callable[[], object], refusal: No) -> None:
        """With the right error, and nothing is appended."""
        head = self.by().head()
        with pytest.raises(refusal.kind) as caught:
            self.with_faults(real)
        assert type(caught.value) is refusal.kind
        if isinstance(caught.value, StaleEpoch):
            assert refusal.holder is not NOBODY
            assert caught.value.holder == refusal.holder
            assert refusal.holder is None or refusal.holder in str(caught.value)
        assert self.by().head() == head

    def with_faults(self, real: Callable[[], T]) -> T:
        """Once with the fault that is due, and again if that was an error."""
        fault, self.fault = self.fault, ""
        if fault == "connections" and not self.by().is_sqlite:
            run_sql(self.url, END_CONNECTIONS)
        if fault not in {"commit", "clock"}:
            return real()
        head, name = self.by().head(), self.by()._engine.dialect.name
        try:
            if fault == "commit":
                run_sql(self.url, *BREAK_COMMITS[name])
            self.clock_is_broken = fault == "clock"
            return real()
        except (LedgerUnavailable, Corrupted, ClockBroken):
            assert self.by().head() == head
        finally:
            self.clock_is_broken = False
            if fault == "commit":
                run_sql(self.url, *MEND_COMMITS[name])
        return real()

    @rule(fault=st.sampled_from(("commit", "clock", "connections")))
    def break_the_next(self, fault: Literal["commit", "clock", "connections"]) -> None:
        self.fault = fault

    @rule()
    def reopen(self) -> None:
        self.close()

    @rule(seconds=st.sampled_from((-3600, -1, 0, 1, 60)))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    # publishers

    @initialize(target=claims, settings=rules, empty=rarely)
    def begin(self, settings: RunSettings, empty: bool) -> Any:
        """Mostly with an open run, so that more comes of the steps after it."""
        if empty:
            return multiple()
        return self.open_run("r1", LINES[0], ACTORS[0], settings, None, take_over=False)

    @initialize(target=members)
    def begin_with_a_replica(self) -> Any:
        return self.join(LINES[0], "r0", "same")

    @rule(
        target=claims,
        run=runs,
        line=lines,
        actor=actors,
        settings=rules,
        parent=st.sampled_from((None, None, None, "r1", "none")),
        take_over=st.booleans(),
    )
    def open_run(
        self,
        run: str,
        line: str,
        actor: str,
        settings: RunSettings,
        parent: str | None,
        *,
        take_over: bool,
    ) -> Any:
        self.line = line
        epoch: int | None
        claim, epoch = self.both(
            lambda: self.by(actor).open_run(
                run, line=line, settings=settings, parent_run=parent, take_over=take_over
            ),
            lambda: self.model.open_run(run, line, actor, settings, parent=parent, take=take_over),
        )
        if claim is None:
            return multiple()
        assert claim == Claim(line, run, epoch or 0)
        return claim

    @rule(claim=claims, actor=actors)
    def release(self, claim: Claim, actor: str) -> None:
        self.line = claim.line
        self.both(
            lambda: self.by(actor).release(claim),
            lambda: self.model.release(claim.run, claim.epoch),
        )

    @precondition(lambda self: len(self.model.runs) > 1)
    @rule(run=runs, take_over=rarely)
    def close_run(self, run: str, take_over: bool) -> None:
        self.both(
            lambda: self.by().close_run(run, take_over=take_over),
            lambda: self.model.close_run(run, take_over),
        )

    @rule(
        target=reservations,
        claim=claims,
        actor=actors,
        attempt=st.integers(1, 12),
        offset=st.sampled_from((None, None, None, None, None, 0, 1, 2, -1, -20)),
    )
    def reserve(self, claim: Claim, actor: str, attempt: int, offset: int | None) -> Any:
        self.line = claim.line
        name = f"a{attempt}"
        version = None if offset is None else self.model.line(claim.line).next_version + offset
        before = set(self.model.line(claim.line).versions)
        reservation, number = self.both(
            lambda: self.by(actor).reserve(claim, attempt=name, version=version),
            lambda: self.model.reserve(claim.run, claim.epoch, name, version),
        )
        if reservation is None:
            return multiple()
        assert reservation.version == number
        if number not in before:
            assert number == max([*before, 0]) + 1 or version == number
        return reservation

    @rule(reservation=reservations, claim=st.none() | claims, content=st.sampled_from("ab"))
    def publish(self, reservation: Reservation, claim: Claim | None, content: str) -> None:
        """With the reservation's own claim, or any other: an old, a newer, another line's."""
        own = Claim(reservation.line, reservation.run, reservation.epoch)
        if claim is None or claim.line != reservation.line:
            claim = own
        self.line = reservation.line
        manifest = manifest_for(reservation, content)
        key = (reservation.line, reservation.version)
        _, done = self.both(
            lambda: self.by().publish(claim, manifest, phases={"save": 0.5}),
            lambda: self.model.publish(
                claim.run,
                claim.epoch,
                reservation.version,
                reservation.attempt,
                manifest.digest,
                same=self.manifests.get(key) == manifest.to_text(),
            ),
        )
        if done:
            self.manifests[key] = manifest.to_text()

    @rule(reservation=reservations)
    def publish_at_once(self, reservation: Reservation) -> None:
        self.publish(reservation, None, "a")

    @rule(target=reservations, line=lines, actor=actors, published=st.sampled_from((1, 1, 1, 0)))
    def train_a_step(self, line: str, actor: str, published: int) -> Any:
        """As a trainer does it: with a claim that holds, the next number, and at once."""
        run = self.model.runs.get(self.model.line(line).open_run or "")
        name = self.model.line(line).open_run if run else f"run{len(self.model.runs)}"
        if run is None or run.holder is None:
            claim = self.open_run(name or "", line, actor, RunSettings(2), None, take_over=True)
        else:
            claim = Claim(line, name or "", run.epoch)
        self.steps += 1
        reservation = self.reserve(claim, actor, 100 + self.steps, None)
        if published:
            self.publish(reservation, None, "a")
        return reservation

    @rule(claim=claims, version=versions)
    def reject(self, claim: Claim, version: int) -> None:
        self.line = claim.line
        self.both(
            lambda: self.by().reject(claim, version, "a test"),
            lambda: self.model.reject(claim.run, claim.epoch, version),
        )

    # operators

    @rule(line=lines, version=versions, pin=st.sampled_from(("keep", "serve", "")))
    def pin(self, line: str, version: int, pin: Literal["keep", "serve", ""]) -> None:
        self.line = line
        self.both(
            (lambda: self.by().pin(line, version, serve=pin == "serve"))
            if pin
            else (lambda: self.by().unpin(line, version)),
            lambda: self.model.pin(line, version, pin),
        )

    @rule(line=lines, version=versions)
    def withdraw(self, line: str, version: int) -> None:
        self.line = line
        self.both(
            lambda: self.by().withdraw(line, version, "a test"),
            lambda: self.model.withdraw(line, version),
        )

    @rule(line=lines, version=versions)
    def roll_back(self, line: str, version: int) -> None:
        self.line = line
        withdrawn, wanted = self.both(
            lambda: self.by().roll_back(line, version, "a test"),
            lambda: self.model.roll_back(line, version),
        )
        assert withdrawn == wanted

    @rule(line=lines, paused=st.booleans())
    def pause(self, line: str, paused: bool) -> None:
        self.line = line
        changed, wanted = self.both(
            lambda: self.by().pause(line, "a test") if paused else self.by().resume(line),
            lambda: self.model.pause(line, paused),
        )
        assert changed == wanted

    @rule(line=lines, off=rarely, grace_over=st.booleans(), timed_out=rarely)
    def settle(self, line: str, off: bool, grace_over: bool, timed_out: bool) -> None:
        self.line = line
        candidate = (self.model.line(line).candidate or 7) + off
        moved, wanted = self.both(
            lambda: self.by().settle(line, candidate, Elapsed(grace_over, timed_out)),
            lambda: self.model.settle(line, candidate, grace_over, timed_out),
        )
        assert moved == wanted

    @rule(
        line=lines,
        batch=st.integers(1, 6),
        sizes=st.lists(versions, max_size=3),
        again=st.booleans(),
    )
    def record_rollouts(self, line: str, batch: int, sizes: list[int], again: bool) -> None:
        self.line = line
        name = f"b{batch}"
        earlier = self.model.line(line).batches.get(name, ())
        if again:
            rows = earlier
        else:
            rows = tuple((f"q{self.requests + n}", v) for n, v in enumerate(sizes))
            self.requests += len(sizes)
        self.both(
            lambda: self.by().record_rollouts(line, name, [_rollout(*row) for row in rows]),
            lambda: self.model.record(line, name, rows),
        )

    @rule(line=lines, request=st.integers(0, 5))
    def record_a_request_again(self, line: str, request: int) -> None:
        self.line = line
        name, rows = f"again{self.requests}", ((f"q{request}", 1),)
        self.requests = max(self.requests, request) + 1
        self.both(
            lambda: self.by().record_rollouts(line, name, [_rollout(*row) for row in rows]),
            lambda: self.model.record(line, name, rows),
        )

    # watchers

    def process(self, line: str, replica: str) -> Process:
        return self.processes.setdefault((line, replica), Process())

    @rule(
        target=members,
        line=lines,
        replica=replicas,
        incarnation=st.sampled_from(("same", "same", "new", "none")),
    )
    def join(self, line: str, replica: str, incarnation: str) -> Membership:
        self.line = line
        known = self.incarnation(line, replica, incarnation)
        member, generation = self.both(
            lambda: self.by().join(line, replica, EngineFacts(known, "build", 6)),
            lambda: self.model.join(line, replica, known),
        )
        assert member == Membership(line, replica, generation)
        return member

    def incarnation(self, line: str, replica: str, which: str) -> str | None:
        if which == "none":
            return None
        process = self.process(line, replica)
        return process.restart() if which == "new" else process.present()

    @rule(member=members)
    def leave(self, member: Membership) -> None:
        self.of(member, lambda m: self.by().leave(m, "a test"), self.model.leave)

    def of(
        self,
        member: Membership,
        real: Callable[[Membership], object],
        model: Callable[..., object],
    ) -> None:
        self.line = member.line
        self.both(
            lambda: real(member),
            lambda: model(member.line, member.replica, member.generation),
        )

    @rule(member=members, off=rarely)
    def declare_lost(self, member: Membership, off: bool) -> None:
        self.line = member.line
        there = self.model.line(member.line).replicas[member.replica]
        lost, wanted = self.both(
            lambda: self.by().declare_lost(
                member.line,
                member.replica,
                generation=member.generation,
                counter=there.counter + off,
                reason="a test",
            ),
            lambda: self.model.declare_lost(
                member.line, member.replica, member.generation, there.counter + off
            ),
        )
        assert lost == wanted

    @rule(member=members, which=st.sampled_from(("same", "new", "none")))
    def change_incarnation(self, member: Membership, which: str) -> None:
        known = self.incarnation(member.line, member.replica, which)
        self.of(
            member,
            lambda m: self.by().change_incarnation(m, EngineFacts(known, "build", 6)),
            lambda a, b, c: self.model.change_incarnation(a, b, c, known),
        )

    @rule(member=members, counter=st.integers(1, 9))
    def beat(self, member: Membership, counter: int) -> None:
        self.of(
            member,
            lambda m: self.by().beat(m, counter),
            lambda a, b, c: self.model.beat(a, b, c, counter),
        )

    def digest_of(self, line: str, version: int) -> str:
        there = self.model.line(line).versions.get(version)
        return (there.digest if there else None) or "0" * 64

    @rule(member=members, version=versions)
    def fetched(self, member: Membership, version: int) -> None:
        digest = self.digest_of(member.line, version)
        self.of(
            member,
            lambda m: self.by().fetched(m, version, digest),
            lambda a, b, c: self.model.fetched(a, b, c, version),
        )

    @rule(member=members, version=versions, wrong=st.sampled_from(("", "", "", "digest", "life")))
    def ack(self, member: Membership, version: int, wrong: str) -> None:
        digest = "f" * 64 if wrong == "digest" else self.digest_of(member.line, version)
        incarnation = self.process(member.line, member.replica).present()
        self.acknowledge(member, version, digest, "1.0" if wrong == "life" else incarnation)

    @rule(member=members)
    def ack_the_candidate(self, member: Membership) -> None:
        candidate = self.model.line(member.line).candidate
        if candidate is not None:
            self.ack(member, candidate, "")

    @rule(line=lines, but=st.sampled_from(("nobody", "nobody", "r0", "r1")))
    def serve_the_candidate(self, line: str, but: str) -> None:
        """As the fleet does it, sometimes without one replica."""
        row = self.model.line(line)
        candidate = row.candidate
        for name in row.live():
            replica = row.replicas[name]
            if candidate is not None and name != but and replica.incarnation is not None:
                member = Membership(line, name, replica.generation)
                self.fetched(member, candidate)
                self.ack(member, candidate, "")

    # hypothesis leaves out some rules in each example; with these, few examples lead nowhere

    @rule(line=lines, actor=actors, rounds=st.integers(1, 3))
    def live_on(self, line: str, actor: str, rounds: int) -> None:
        for _ in range(rounds):
            self.train_a_step(line, actor, 1)
            self.serve_the_candidate(line, "nobody")

    @rule(line=lines, actor=actors, but=st.sampled_from(("nobody", "r0", "r1")))
    def train_and_serve(self, line: str, actor: str, but: str) -> None:
        self.train_a_step(line, actor, 1)
        self.serve_the_candidate(line, but)

    def acknowledge(self, member: Membership, version: int, digest: str, incarnation: str) -> None:
        self.of(
            member,
            lambda m: self.by().ack(
                m,
                version,
                digest=digest,
                incarnation=incarnation,
                build="build",
                probe=(-0.5,),
                phases={"load": 0.1},
            ),
            lambda a, b, c: self.model.ack(
                a, b, c, version, digest=digest, incarnation=incarnation
            ),
        )

    @rule(member=members, version=versions, permanent=st.booleans())
    def load_failed(self, member: Membership, version: int, permanent: bool) -> None:
        digest = self.digest_of(member.line, version)
        self.of(
            member,
            lambda m: self.by().load_failed(
                m, version, digest=digest, reason="a test", permanent=permanent
            ),
            lambda a, b, c: self.model.load_failed(a, b, c, version, permanent),
        )

    @rule(member=members, version=versions)
    def evicted(self, member: Membership, version: int) -> None:
        digest = self.digest_of(member.line, version)
        self.of(
            member,
            lambda m: self.by().evicted(m, version, digest=digest, reason="outside"),
            lambda a, b, c: self.model.evicted(a, b, c, version),
        )

    @rule(member=members, version=versions)
    def report(self, member: Membership, version: int) -> None:
        """Events that change no state."""
        self.of(
            member,
            lambda m: self.by().foreign_adapter_seen(m, "strange", "/x", "a test"),
            self.model.member,
        )
        self.of(
            member,
            lambda m: self.by().probe_mismatch(
                m, version, digest="0" * 64, reference="r0", difference=0.5
            ),
            self.model.member,
        )

    # what must hold after each step

    @invariant()
    def the_chain_grows_and_verifies(self) -> None:
        """Dense, chained and in time; each new event is folded for `check_line`."""
        seq, last_hash, recorded_at = self.seen
        for event in self.by().events(after=seq):
            assert event.seq == seq + 1
            assert event.prev_hash == last_hash
            assert event.recorded_at >= recorded_at
            seq, last_hash, recorded_at = event.seq, event.hash, event.recorded_at
            self.replayed(event.line).take(event)
        if seq > self.seen[0]:
            report = verify(self.by())
            assert report.problems == ()
            assert (report.head_seq, report.head_hash) == (seq, last_hash)
        self.seen = (seq, last_hash, recorded_at)

    def replayed(self, line: str) -> Replayer:
        return self.replayers.setdefault(line, Replayer(line))

    @invariant()
    def the_line_is_as_the_model_says(self) -> None:
        self.check_line(self.line)

    def check_line(self, line: str) -> None:
        """I7 as well: view, replayed state and as-of say the same about the head."""
        ledger, row = self.by(), self.model.line(line)
        view = ledger.view(line, also=row.versions)
        assert view.seq == self.seen[0]
        assert (view.current, view.candidate) == (row.current, row.candidate)
        assert (view.line.paused, view.line.epoch) == (row.paused, row.epoch)
        assert view.line.next_version == row.next_version
        assert [(d.version, d.role) for d in view.desired] == self.model.desired(line)
        assert (view.run.run if view.run else None) == row.open_run
        assert {n: (r.generation, r.incarnation, r.state) for n, r in view.replicas.items()} == {
            n: (r.generation, r.incarnation, r.state) for n, r in row.replicas.items()
        }
        assert ledger.heartbeats(line) == {
            n: (r.generation, r.counter) for n, r in row.replicas.items()
        }
        for number in row.versions:
            assert view.acked_by(number) == row.acked_by(number)
        versions = {v.version: v for v in ledger.versions(line=line)}
        self.check_versions(line, versions)
        state = self.replayed(line).state()
        assert (view.line, view.replicas, versions) == (state.line, state.replicas, state.versions)
        assert state.residency == {(r.replica, r.version): r for r in ledger.residency(line)}
        served = {
            name: tuple(n for n in sorted(row.versions) if name in row.acked_by(n))
            for name in row.live()
        }
        assert state.served() == served
        if view.seq:
            self.check_as_of(as_of(ledger, line, view.seq), row, served)

    def check_as_of(self, there: AsOf, row: Line, served: dict[str, tuple[int, ...]]) -> None:
        wanted = (row.open_run, row.current, row.candidate)
        assert (there.run, there.current, there.candidate) == wanted
        assert sorted((s.replica, s.version, s.digest) for s in there.served) == sorted(
            (name, n, row.versions[n].digest) for name, numbers in served.items() for n in numbers
        )

    def check_versions(self, line: str, found: dict[int, VersionRow]) -> None:
        """States, and I1: a digest once seen under a name stays for ever."""
        wanted = self.model.line(line).versions
        assert {n: (v.state, v.pin, v.digest, v.run, v.attempt) for n, v in found.items()} == {
            n: (v.state, v.pin, v.digest, v.run, v.attempt) for n, v in wanted.items()
        }
        for number, version in found.items():
            if version.digest is not None:
                assert self.digests.setdefault((line, number), version.digest) == version.digest

    def check_everything(self) -> None:
        self.the_chain_grows_and_verifies()
        ledger = self.by()
        before = {}
        for line, row in self.model.lines.items():
            self.check_line(line)
            assert self.replayed(line).state() == state_at(ledger, line, self.seen[0])
            before[line] = ledger.view(line, also=row.versions)
            for number in row.versions:
                still = {s.replica for s in audit(ledger, line, number).servings if not s.ended_at}
                assert still == set(row.acked_by(number))
            recorded = [(r.request, r.version) for r in ledger.rollouts(RolloutFilter(line=line))]
            assert recorded == [r for batch in row.batches.values() for r in batch]
        for run, wanted in self.model.runs.items():
            found = ledger.run(run)
            assert (found.line, found.state, found.epoch, found.holder) == (
                wanted.line,
                "open" if wanted.open else "closed",
                wanted.epoch,
                wanted.holder,
            )
        assert repair_projections(ledger) == ledger.head()[0]
        for line, view in before.items():
            assert ledger.view(line, also=self.model.line(line).versions) == view


def _rollout(request: str, version: int) -> NewRollout:
    return NewRollout(
        request=request,
        run="r1",
        version=version,
        replica="r0",
        asked_name="trl-policy",
        status=200,
        started_at="2026-01-01T12:00:00.000000+00:00",
    )
