"""The state machine's frame: a real ledger and the model side by side, faults, and the checks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, invariant, rule

from policyline.ledger import Ledger
from policyline.ledger.errors import Corrupted, LedgerUnavailable, StaleEpoch
from policyline.ledger.events import GENESIS_HASH
from policyline.ledger.read.as_of import AsOf, as_of
from policyline.ledger.read.audit import audit
from policyline.ledger.read.replay import Replayer, state_at
from policyline.ledger.read.verify import verify
from policyline.ledger.rollouts import RolloutFilter
from policyline.ledger.rows import VersionRow
from policyline.ledger.transfer import repair_projections
from tests.behind_the_back import run_sql
from tests.simulation.ledger.model import Model
from tests.simulation.ledger.model_rows import NOBODY, Line, No
from tests.simulation.pieces import Counted

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
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


class ClockBroken(Exception):
    """Raised inside a transaction, after the lock was taken."""


class Harness(Counted):
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
        self.manifests: dict[tuple[str, int], str] = {}
        self.line = LINES[0]
        self.replayers: dict[str, Replayer] = {}
        self.compared: dict[str, tuple[int, str]] = {}
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
        """Unless neither has changed since they were compared: most steps are refused."""
        both = (self.seen[0], repr((self.model.line(self.line), self.model.runs)))
        if self.compared.get(self.line) != both:
            self.check_line(self.line)
            self.compared[self.line] = both

    def check_line(self, line: str) -> None:
        """I7 as well: view, replayed state and as-of say the same about the head."""
        ledger, row = self.by(), self.model.line(line)
        view = ledger.view(line, also=row.versions)
        assert view.seq == self.seen[0]
        assert (view.current, view.candidate) == (row.current, row.candidate)
        assert (view.line.paused, view.line.epoch) == (row.paused, row.epoch)
        assert view.line.next_version == row.next_version
        assert [(d.version, d.role) for d in view.desired] == self.model.desired(line)
        held = (view.run.run, view.run.holder) if view.run else None
        run = row.open_run
        assert held == (None if run is None else (run, self.model.runs[run].holder))
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
        assert state.serving == served
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
            assert len(ledger.phases(line=line)) == row.phases
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
