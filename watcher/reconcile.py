"""One turn of the loop: observe, plan, apply, and remember what came of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from policyline.ledger.errors import LedgerUnavailable, StaleGeneration
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.watcher.cache import Cache
from policyline.watcher.core import memory as remember
from policyline.watcher.core.memory import Failure
from policyline.watcher.core.model import (
    Ack,
    Action,
    DeleteLocal,
    DeleteStray,
    Desired,
    Fetch,
    Free,
    Known,
    Limits,
    Load,
    Memory,
    Observed,
    Pause,
    Plan,
    Prove,
    Reject,
    RemoveForeign,
    ReportForeign,
    Resume,
    Unknown,
    Unload,
    Version,
    after_eviction,
    with_adapter,
    without_adapter,
    without_resident,
)
from policyline.watcher.core.outcome import Applied, Outcome, Rejected, Retry
from policyline.watcher.core.plan import does_without_a_look, plan
from policyline.watcher.execute import Executor
from policyline.watcher.load_version import Server
from policyline.watcher.membership import Seat
from policyline.watcher.metrics import Metrics
from policyline.watcher.observe import Eyes, Look
from policyline.watcher.settings import SidecarSettings
from policyline.watcher.status import Board
from policyline.watcher.transition_log import News
from policyline.watcher.vllm.errors import EngineTimeout

log = logging.getLogger(__name__)

_FRESH_S = 1.0
"""How long an observation may carry several steps. Only local steps and what we ourselves load,
unload and free are applied to it; everything else is looked at anew."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """Nothing was left to do."""

    desired: Desired
    observed: Known
    until_s: float
    """When to turn again, if nothing new is desired before."""
    looked_at_s: float
    """When the engine was looked at."""


class Reconciler:
    """Turns the loop. Holds the memory; everything else is re-read at each turn.

    Args:
        settings: of the sidecar.
        seat: this watcher's place in the ledger.
        eyes: observe.
        executor: applies.
        server: knows the phases of the versions in hand.
        cache: local copies.
        board: is told what happens.
        metrics: count.
        now: monotonic clock in seconds.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        *,
        seat: Seat,
        eyes: Eyes,
        executor: Executor,
        server: Server,
        cache: Cache,
        board: Board,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._seat = seat
        self._eyes = eyes
        self._executor = executor
        self._server = server
        self._cache = cache
        self._board = board
        self._metrics = metrics
        self._now = now
        self._memory = Memory()
        self._first_seen_s: dict[int, float] = {}
        self._news = News(metrics)
        self._rest: _Rest | None = None
        self.view: LineSnapshot | None = None
        """The newest view of the line."""
        self.stopping = False
        """Finish the action in hand and begin no other."""

    async def turn(self, woken_at_s: float, *, look_at_engine: bool = True) -> float:
        """Observe, plan and apply until the observation is used up.

        Args:
            woken_at_s: when the news came that this turn is about.
            look_at_engine: look at it even if the ledger shows nothing new.

        Returns:
            When to turn again at the latest; a time that has passed means at once.

        Raises:
            StaleGeneration: this watcher does not speak for the replica any more.
            WatcherError: the sidecar cannot go on.
        """
        view = await self._eyes.read_ledger(fully=look_at_engine)
        rest = None if look_at_engine else self._rest
        earlier = None
        if isinstance(view, LineSnapshot):
            self._see(view)
            desired_now = self._eyes.desired(view)
            if rest is not None and rest.desired == desired_now:
                return rest.until_s
            self._begin_fetch(desired_now, woken_at_s)
            earlier = self._last_look(rest, view, desired_now, woken_at_s)
        self._rest = None
        try:
            look = earlier or await self._eyes.complete(view)
            begun_s = self._now()
            if earlier is None:
                self._take_in(look, woken_at_s)
            desired, observed = look.desired, look.observed
            while not self.stopping:
                planned = plan(desired, observed, self._memory, self._limits(), self._now())
                action = next(iter(planned.actions), None)
                if earlier is not None and not does_without_a_look(planned, desired, observed):
                    break
                self._news.held(planned.held, _unserved(desired))
                if action is None:
                    return self._come_to_rest(
                        planned, desired, observed, begun_s, rest if earlier else None
                    )
                self._board.plan = planned
                desired, observed, used_up = await self._apply(action, desired, observed)
                if self._memory.failures:
                    return self._memory.look_again_s
                if used_up or self._now() - begun_s > _FRESH_S:
                    break
        except LedgerUnavailable as error:
            self._news.away("ledger_writes", str(error))
            return self._fail_turn(str(error))
        return self._now()

    def _last_look(
        self, rest: _Rest | None, view: LineSnapshot, desired: Desired, woken_at_s: float
    ) -> Look | None:
        """What is desired now, on an earlier look at the engine; None if that will not do.

        Another look before a load would cost a version a third of its way. The last one stands for
        it if nothing was left to do then and that was a moment ago: the list and the incarnation
        are read again after the probe, and one that is the same was the same throughout (I4 (b),
        (d)). So it serves copies, loads, and seeing that there is nothing to do.
        """
        if rest is None or self._now() - rest.looked_at_s > self._settings.poll_interval_s:
            return None
        memory = remember.note_outside(self._memory, desired, rest.observed, self._now())
        planned = plan(desired, rest.observed, memory, self._limits(), self._now())
        if not does_without_a_look(planned, desired, rest.observed):
            return None
        self._memory = memory
        self._note_sight(desired, woken_at_s)
        return Look(desired, rest.observed, view)

    def _take_in(self, look: Look, woken_at_s: float) -> None:
        board, metrics = self._board, self._metrics
        board.turned_at_s = self._now()
        board.desired, board.observed = look.desired, look.observed
        for what, seen, gauge in (
            ("ledger", look.desired, metrics.ledger_up),
            ("engine", look.observed, metrics.engine_up),
        ):
            gauge.set(not isinstance(seen, Unknown))
            if isinstance(seen, Unknown):
                self._news.away(what, seen.cause)
            else:
                self._news.back(what)
        if isinstance(look.desired, Unknown) or isinstance(look.observed, Unknown):
            self._fail_turn("engine or ledger cannot be read")
        if look.view is not None:
            self._see(look.view)
        if isinstance(look.desired, Desired):
            self._memory = remember.note(self._memory, look.desired, look.observed, self._now())
            self._note_sight(look.desired, woken_at_s)
            if isinstance(look.observed, Known):
                self._metrics.measure(look.desired, look.observed)
                self._tell_pause(look.desired, look.observed)

    def _tell_pause(self, desired: Desired, observed: Known) -> None:
        if desired.paused and observed.paused is None:
            self._news.away("pause_route", f"the line is to be paused: {observed.pause_cause}")
        else:
            self._news.back("pause_route")

    def _see(self, view: LineSnapshot) -> None:
        """Take a view of the line.

        Raises:
            StaleGeneration: the replica is not ours any more.
        """
        self.view = view
        self._seat.watch_slots(view)
        row, member = view.replicas.get(self._seat.replica), self._seat.member
        if row is None or row.generation != member.generation or row.state != "joined":
            raise StaleGeneration(f"replica {member.replica!r} is not ours any more")

    def _note_sight(self, desired: Desired, woken_at_s: float) -> None:
        versions = {v.version: v for v in (*desired.wanted, *desired.outside)}
        self._first_seen_s = {n: self._first_seen_s.get(n, woken_at_s) for n in versions}
        self._server.forget(versions)

    def _limits(self) -> Limits:
        settings = self._settings
        return Limits(
            max_loras=self._seat.max_loras,
            linger_s=settings.linger_s,
            grace_s=settings.grace_s,
            poll_interval_s=settings.poll_interval_s,
            take_over=settings.take_over,
            probe_interval_s=settings.probe_interval_s,
            silent_s=settings.probe_timeout_s,
        )

    async def _apply(
        self, action: Action, desired: Desired | Unknown, observed: Observed
    ) -> tuple[Desired | Unknown, Observed, bool]:
        """Apply one action; return what is known after it, and whether to look anew."""
        target = getattr(action, "target", None)
        if isinstance(target, Version) and isinstance(action, (Fetch, Load, Ack)):
            seen_s = self._first_seen_s.get(target.version, self._now())
            self._server.noticed(target.version, self._now() - seen_s)
        outcome = await self._executor.apply(action, observed)
        await self._remember(action, outcome, observed)
        if isinstance(outcome, Applied) and isinstance(observed, Known):
            match action:
                case Fetch():
                    local = self._cache.local(self._places(desired))
                    verified = self._cache.verified(local)
                    return desired, replace(observed, local=local, verified=verified), False
                case Load(loaded):
                    return await self._after_load(loaded, observed)
                case Unload(version) if isinstance(desired, Desired):
                    known = without_adapter(observed, version.name)
                    return after_eviction(desired, version.version), known, False
                case Free(freed):
                    return desired, without_resident(observed, freed.version), False
                case _:
                    pass
        return desired, observed, True

    async def _after_load(
        self, loaded: Version, observed: Known
    ) -> tuple[Desired | Unknown, Observed, bool]:
        """What is known after a load that was acked: it was listed with our path in this very life.

        The ledger is read again: what came meanwhile goes before the next load, and the observer
        waits for this ack, of which no signal comes.
        """
        self._eyes.see_loaded(loaded.version)
        view = await self._eyes.read_ledger(fully=False)
        known = with_adapter(observed, loaded.name, observed.path(loaded))
        if isinstance(view, Unknown):
            return view, known, True
        self._see(view)
        return self._eyes.desired(view), known, False

    async def _remember(self, action: Action, outcome: Outcome, observed: Observed) -> None:
        if isinstance(outcome, Applied):
            self._news.back("ledger_writes")
            self._memory = remember.turn_done(self._memory)
            self._remember_success(action, observed)
            return
        self._metrics.errors.labels(outcome.error).inc()
        log.debug("%s: %s", type(action).__name__, outcome.cause)
        if isinstance(outcome, Retry) and outcome.hung and isinstance(observed, Known):
            self._engine_hangs(observed.incarnation, outcome.cause)
            if outcome.broke and isinstance(action, (Load, Ack)):
                self._memory = remember.engine_broke(
                    self._memory, action.target.version, observed.incarnation
                )
            return
        if outcome.error == EngineTimeout.__name__:
            self._memory = remember.doubted(self._memory, outcome.cause)
        target = getattr(action, "target", None)
        if isinstance(action, RemoveForeign):
            self._delay(action.version, outcome.cause)
        elif isinstance(action, DeleteLocal):
            for copied in action.targets:
                self._delay(copied.version, outcome.cause)
        elif isinstance(action, DeleteStray):
            self._memory = replace(self._memory, stray_since_s={})  # the grace begins anew
        elif isinstance(target, Version):
            await self._remember_failure(action, target, outcome, observed)
        else:
            self._fail_turn(outcome.cause)

    def _remember_success(self, action: Action, observed: Observed) -> None:
        match action:
            case ReportForeign(name, path) if isinstance(observed, Known):
                self._memory = remember.foreign_reported(
                    self._memory, observed.incarnation, name, path
                )
            case Pause() | Resume() if isinstance(observed, Known):
                ours = observed.incarnation if isinstance(action, Pause) else None
                self._memory = remember.paused(self._memory, ours)
            case Prove() | DeleteLocal() | DeleteStray():
                self._engine_answered()
            case Load(target) | Ack(target):
                self._engine_answered()
                self._memory = remember.version_done(self._memory, target.version)
            case Unload(target) | Reject(target):
                self._memory = remember.version_done(self._memory, target.version)
            case _:
                pass

    async def _remember_failure(
        self, action: Action, target: Version, outcome: Retry | Rejected, observed: Observed
    ) -> None:
        first = target.version not in self._memory.troubles
        self._delay(target.version, outcome.cause)
        serves = isinstance(action, (Load, Ack)) or (
            isinstance(action, Fetch) and not action.restores
        )
        if not serves:  # a served version is not given up because its files cannot be restored
            return
        if isinstance(outcome, Rejected):
            await self._executor.say_failed(target, outcome.cause, permanent=True)
            self._memory = remember.version_done(self._memory, target.version)
            return
        if outcome.broke and isinstance(observed, Known):
            self._memory = remember.engine_broke(self._memory, target.version, observed.incarnation)
        if first:
            await self._executor.say_failed(target, outcome.cause, permanent=False)

    def _engine_answered(self) -> None:
        self._memory = remember.answered(self._memory, self._now())
        self._board.hang = ""
        self._metrics.engine_hung.set(0)
        self._news.back("generation")

    def _engine_hangs(self, incarnation: str, cause: str) -> None:
        self._memory = remember.hangs(
            self._memory,
            incarnation,
            self._failure(cause),
            self._now() - self._settings.probe_timeout_s,
        )
        self._board.hang = cause
        self._metrics.engine_hung.set(1)
        self._news.away("generation", cause)

    def _delay(self, version: int, cause: str) -> None:
        self._memory = remember.version_failed(self._memory, version, self._failure(cause))

    def _failure(self, cause: str) -> Failure:
        chance = random.random()  # noqa: S311 - jitter
        return Failure(cause, self._now(), chance, self._settings.poll_interval_s)

    def _fail_turn(self, cause: str) -> float:
        """Back off; return when to turn again."""
        self._memory = remember.turn_failed(self._memory, self._failure(cause))
        return self._memory.look_again_s

    def _come_to_rest(
        self,
        planned: Plan,
        desired: Desired | Unknown,
        observed: Observed,
        looked_at_s: float,
        rest: _Rest | None,
    ) -> float:
        """Nothing is to be done; return when to turn again.

        Args:
            planned: what says so.
            desired: of the plan.
            observed: of the plan.
            looked_at_s: when the engine was looked at, if it was for this.
            rest: on whose look the plan rests otherwise: no later look than it asked for.
        """
        until_s = min(planned.wake_at_s, looked_at_s + self._settings.poll_interval_s)
        if rest is not None:
            until_s, looked_at_s = min(until_s, rest.until_s), rest.looked_at_s
        self._board.plan = replace(planned, wake_at_s=until_s)
        self._board.desired, self._board.observed = desired, observed
        if isinstance(desired, Desired) and isinstance(observed, Known):
            self._memory = remember.turn_done(self._memory)
            self._rest = _Rest(desired, observed, until_s, looked_at_s)
            self._metrics.measure(desired, observed)
        return until_s

    @staticmethod
    def _places(desired: Desired | Unknown) -> set[str]:
        wanted = () if isinstance(desired, Unknown) else desired.wanted
        return {version.place for version in wanted}

    def _begin_fetch(self, desired: Desired, woken_at_s: float) -> None:
        """Let the copy of the next version begin while the engine is still being asked."""
        unsaid = [version for version in desired.wanted if version.said in {None, "evicted"}]
        local = self._cache.local({v.place for v in unsaid}) if unsaid else frozenset()
        for version in unsaid:
            if version.place not in local:
                if version.version not in self._memory.troubles:
                    self._server.noticed(version.version, self._now() - woken_at_s)
                    self._server.prefetch(version)
                return


def _unserved(desired: Desired | Unknown) -> set[str]:
    if isinstance(desired, Unknown):
        return set()
    return {v.name for v in desired.wanted if not v.acked_by(desired.incarnation)}
