"""Every verb of publishers and operators, in any order."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.stateful import initialize, multiple, precondition, rule

from policyline.ledger import Claim, Reservation, RunSettings
from policyline.ledger.readiness import Elapsed
from policyline.ledger.rollouts import NewRollout
from tests.ledger_builders import manifest_for
from tests.simulation.ledger.harness import ACTORS, LINES, Harness

lines = st.sampled_from((LINES[0], LINES[0], LINES[0], LINES[1]))
runs = st.sampled_from(("r1", "r2", "r3"))
actors = st.sampled_from(ACTORS)
replicas = st.sampled_from(("r0", "r1"))
versions = st.integers(1, 8)
rarely = st.integers(0, 4).map(lambda n: n == 4)
rules = st.builds(
    RunSettings, max_staleness=st.integers(0, 2), min_ready=st.sampled_from((1, 2, None))
)


class Publishers(Harness):
    """Rules of publishers and operators."""

    claims, reservations = Harness.claims, Harness.reservations

    @initialize(target=claims, settings=rules, empty=rarely)
    def begin(self, settings: RunSettings, empty: bool) -> Any:
        """Mostly with an open run, so that more comes of the steps after it."""
        if empty:
            return multiple()
        return self.open_run("r1", LINES[0], ACTORS[0], settings, None, take_over=False)

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
