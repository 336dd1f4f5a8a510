"""Faults, restarts and operators in any order; the invariants after every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar, get_args

import httpx
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from policyline.engines.simulated.faults import Fault, FaultKind
from policyline.ledger.errors import LedgerError
from policyline.ledger.names import DEFAULT_LINE, policy_name
from tests.simulation.pieces import Counted
from tests.simulation.watcher.faulty import LedgerFault
from tests.simulation.watcher.settings import POLL_S, REPLICAS, TRAINER, WITHIN_S
from tests.simulation.watcher.trainer import Kind
from tests.simulation.watcher.world import World

T = TypeVar("T")

replicas = st.sampled_from(REPLICAS)
kinds = st.sampled_from(("good", "good", "good", "good", *get_args(Kind)))
soon = st.sampled_from((0.0, 0.002, 0.004, 0.007, 0.02, 0.1))
later = st.sampled_from((0.4, 1.0, 2.5, POLL_S, 2 * POLL_S, 25.0))
calls = st.sampled_from(("load", "load", "unload", "models", "completions", "metrics"))
faults = st.sampled_from(("fail", "hang", "delay", "lose_reply"))
effects = st.integers(1, 60)
picks = st.integers(0, 11)
"""Which of the things there are then. No draw may depend on the state: what cannot be drawn again
after a change of the code, or of the example, cannot be shrunk."""


def picked(things: Sequence[T], pick: int) -> T:
    """One of them, whichever there are."""
    return things[pick % len(things)]


class WatcherMachine(Counted):
    """A subclass says with `make_world` how to make an empty world."""

    make_world: Callable[[], World]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).make_world()
        self.tasks: list[asyncio.Task[None]] = []

    @initialize()
    def begin(self) -> None:
        self.world.revive()
        self.world.advance(0.5)
        self.world.publish("good")
        self.world.advance(0.5)

    # --- what the trainer, the operator and time do

    @rule(kind=kinds, wait_s=soon)
    def publish(self, kind: Kind, wait_s: float) -> None:
        self.world.publish(kind)
        self.world.advance(wait_s)

    @rule(versions=st.integers(2, 4), wait_s=later)
    def train(self, versions: int, wait_s: float) -> None:
        """So many good versions, each with time to become current; what is down was started."""
        self.world.revive()
        for _ in range(versions):
            self.world.publish("good")
            self.world.advance(0.5)
        self.world.advance(wait_s)

    @rule(wait_s=st.one_of(soon, later, later))
    def time_passes(self, wait_s: float) -> None:
        self.world.advance(wait_s)

    @rule(verb=st.sampled_from(("withdraw", "pin", "unpin", "roll_back")), pick=picks)
    def steer(self, verb: str, pick: int) -> None:
        version = picked(sorted(self.world.trainer.kinds)[-5:], pick)
        ledger = self.world.ledger
        try:
            match verb:
                case "withdraw":
                    ledger.withdraw(DEFAULT_LINE, version, "a test")
                case "pin":
                    ledger.pin(DEFAULT_LINE, version, serve=True)
                case "unpin":
                    ledger.unpin(DEFAULT_LINE, version)
                case _:
                    ledger.roll_back(DEFAULT_LINE, version, "a test")
        except LedgerError as refusal:
            note(f"refused: {refusal}")
        self.world.advance(0.003)

    @rule(replica=replicas, pick=picks, tokens=st.integers(1, 120))
    def ask(self, replica: str, pick: int, tokens: int) -> None:
        """A rollout: by I2 it finds the version it was routed for."""
        view = self.world.view()
        served = [v for v in self.world.trainer.kinds if replica in view.acked_by(v)]
        if not served:
            return
        version = picked(served, pick)
        incarnation = view.replicas[replica].incarnation
        self.tasks.append(
            self.world.loop.create_task(self._ask(replica, version, tokens, incarnation))
        )
        self.world.advance(0.002)

    async def _ask(self, replica: str, version: int, tokens: int, incarnation: str | None) -> None:
        process = self.world.engines[replica]
        name = policy_name(DEFAULT_LINE, version)
        body = {
            "model": name,
            "prompt": [5, 6, 7, version],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        request = httpx.Request("POST", "http://engine.invalid/v1/completions", json=body)
        try:
            answer = await process.answer(request)
        except httpx.HTTPError:
            return
        lost = (replica, name) in self.world.invariants.stolen
        if answer.status_code == 404 and process.incarnation == incarnation and not lost:
            self.world.violations.append(f"I2: {replica} was asked for v{version}: 404")

    # --- what goes wrong

    @rule(replica=replicas, call=calls, kind=faults, times=st.integers(1, 4))
    def engine_misbehaves(self, replica: str, call: str, kind: FaultKind, times: int) -> None:
        fault = Fault(call, kind, times=times, status=500, delay_s=1.0)
        self.world.engines[replica].script(fault)

    @rule(replica=replicas, call=st.sampled_from(("load", "completions")))
    def engine_will_die(self, replica: str, call: str) -> None:
        self.world.engines[replica].script(Fault(call, "die"))

    @rule(replica=replicas, times=st.integers(1, 2))
    def engine_lists_the_past(self, replica: str, times: int) -> None:
        self.world.engines[replica].script(Fault("models", "stale", times=times))

    @rule(replica=replicas, pick=picks)
    def somebody_unloads(self, replica: str, pick: int) -> None:
        """Behind the watcher's back, perhaps while there is none."""
        process = self.world.engines[replica]
        if process.service is not None and process.service.registry:
            name = picked(sorted(process.service.registry), pick)
            del process.service.registry[name]
            self.world.invariants.note_theft(replica, name)

    @rule(replica=replicas, wait_s=soon)
    def engine_restarts(self, replica: str, wait_s: float) -> None:
        """So fast that no poll saw it down, or after a while."""
        process = self.world.engines[replica]

        async def restart() -> None:
            await process.kill()
            process.start()

        self.world.run(restart())
        self.world.advance(wait_s)

    @rule(replica=replicas, wait_s=later)
    def engine_vanishes(self, replica: str, wait_s: float) -> None:
        self.world.run(self.world.engines[replica].kill())
        self.world.advance(wait_s)

    @rule(replica=replicas, after=effects)
    def watcher_will_be_killed(self, replica: str, after: int) -> None:
        if replica in self.world.watchers:
            self.world.watchers[replica].lifeline.end_after(after)

    @rule(replica=replicas)
    def watcher_is_killed_now(self, replica: str) -> None:
        if replica in self.world.watchers:
            self.world.watchers[replica].lifeline.end()
            self.world.advance(0.0)

    @rule(wait_s=soon)
    def the_dead_are_started(self, wait_s: float) -> None:
        self.world.revive()
        self.world.advance(wait_s)

    @rule(replica=replicas, wait_s=soon)
    def watcher_is_stopped(self, replica: str, wait_s: float) -> None:
        if replica in self.world.watchers:
            self.world.watchers[replica].stop()
            self.world.advance(wait_s)

    @rule(replica=replicas)
    def second_watcher(self, replica: str) -> None:
        first = self.world.watchers.get(replica)
        reachable = not self.world.weather.ledger
        if reachable and first is not None and first.generation is not None:
            self.world.supersede_watcher(replica)

    @rule(
        fault=st.sampled_from(("away", "read_only", "deaf", "", "")),
        replies=st.integers(1, 6),
        wait_s=later,
    )
    def ledger_breaks(self, fault: LedgerFault, replies: int, wait_s: float) -> None:
        self.world.weather.ledger, self.world.weather.replies_lost = fault, replies
        self.world.advance(wait_s)

    @rule(host=st.sampled_from((*REPLICAS, TRAINER)), hours=st.integers(-30, 30))
    def clock_steps(self, host: str, hours: int) -> None:
        """Somebody sets a host's wall clock; between any two effects of its watcher, so to say."""
        self.world.wall_off_s[host] += 3600.0 * hours

    @rule(fails=st.integers(0, 3), stalls=st.integers(0, 1))
    def storage_breaks(self, fails: int, stalls: int) -> None:
        weather = self.world.weather
        weather.storage_fails, weather.storage_stalls = fails, stalls

    @rule()
    def faults_stop(self) -> None:
        self.world.fair_weather()

    # --- what holds

    @invariant()
    def invariants_hold(self) -> None:
        self.world.invariants.check()
        assert not self.world.violations, self.world.violations

    def teardown(self) -> None:
        try:
            if not self.world.violations and self.world.trainer.kinds:
                self.reach_the_desired_set()
        finally:
            self.world.close()

    def reach_the_desired_set(self) -> None:
        """I8 and I9: the faults stop, and soon everything good is served."""
        world = self.world
        world.fair_weather()
        world.finish_stopping()
        world.revive()
        waited_s = 0.0
        while missing := world.invariants.unserved():
            assert waited_s < WITHIN_S, f"I8: after {waited_s:g} s without faults: {missing}"
            world.advance(0.5)
            waited_s += 0.5
            self.invariants_hold()
        world.advance(0.1)
        self.invariants_hold()
