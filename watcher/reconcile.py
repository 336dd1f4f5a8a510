"""One reconcile pass: observe, plan, apply, and record the outcome."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from policyline.ledger.errors import LedgerUnavailable, StaleGeneration
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.watcher.cache import Cache
from policyline.watcher.core import reconcile_state
from policyline.watcher.core.model import (
    Ack,
    Action,
    DeleteLocal,
    DeleteOrphans,
    Desired,
    Fetch,
    Free,
    Known,
    Limits,
    Load,
    Observed,
    Pause,
    Plan,
    Prove,
    ReconcileState,
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
    without_adapter_id,
)
from policyline.watcher.core.outcome import Applied, Outcome, Rejected, Retry
from policyline.watcher.core.plan import does_without_a_look, plan
from policyline.watcher.core.reconcile_state import FailedAttempt
from policyline.watcher.execute import Executor
from policyline.watcher.load_version import VersionLoader
from policyline.watcher.membership import ReplicaMembership
from policyline.watcher.metrics import SidecarMetrics
from policyline.watcher.observe import Observation, Observer
from policyline.watcher.settings import SidecarSettings
from policyline.watcher.status import SidecarStatus
from policyline.watcher.transition_log import (
    ENGINE_READ,
    GENERATION,
    LEDGER_READ,
    LEDGER_WRITE,
    PAUSE,
    TransitionLog,
)
from policyline.watcher.vllm.errors import EngineTimeout

log = logging.getLogger(__name__)

_FRESH_S = 1.0
"""How long an observation may carry several steps. Only local steps and what we ourselves load,
unload and free are applied to it; everything else is observed again."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """Nothing was left to do."""

    desired: Desired
    observed: Known
    until_s: float
    """When to reconcile again, if nothing new is desired before."""
    observed_at_s: float
    """When the engine was observed."""


class Reconciler:
    """Reconciles. Holds the reconcile state; everything else is re-read in each pass.

    Args:
        settings: of the sidecar.
        membership: this replica in the ledger.
        observer: observes ledger, engine and disk.
        executor: applies.
        server: knows the phases of the versions in hand.
        cache: local copies.
        status: shows what happens.
        metrics: count.
        now: monotonic clock in seconds.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        *,
        membership: ReplicaMembership,
        observer: Observer,
        executor: Executor,
        loader: VersionLoader,
        cache: Cache,
        status: SidecarStatus,
        metrics: SidecarMetrics,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._observer = observer
        self._executor = executor
        self._loader = loader
        self._cache = cache
        self._status = status
        self._metrics = metrics
        self._now = now
        self._state = ReconcileState()
        self._first_seen_s: dict[int, float] = {}
        self._transitions = TransitionLog(metrics)
        self._rest: _Rest | None = None
        self.view: LineSnapshot | None = None
        """The newest view of the line."""
        self.stopping = False
        """Finish the action in hand and begin no other."""

    async def reconcile(self, woken_at_s: float, *, observe_engine: bool = True) -> float:
        """Observe, plan and apply until the observation is used up.

        Args:
            woken_at_s: when the change came that this pass is about.
            observe_engine: observe it even if the ledger shows nothing new.

        Returns:
            When to reconcile again at the latest; a time that has passed means at once.

        Raises:
            StaleGeneration: this watcher does not speak for the replica any more.
            WatcherError: the sidecar cannot go on.
        """
        view = await self._observer.read_ledger(fully=observe_engine)
        rest = None if observe_engine else self._rest
        earlier = None
        if isinstance(view, LineSnapshot):
            self._see(view)
            desired_now = self._observer.desired(view)
            if rest is not None and rest.desired == desired_now:
                return rest.until_s
            self._begin_fetch(desired_now, woken_at_s)
            earlier = self._last_look(rest, view, desired_now, woken_at_s)
        self._rest = None
        try:
            observation = earlier or await self._observer.complete(view)
            begun_s = self._now()
            if earlier is None:
                self._record(observation, woken_at_s)
            desired, observed = observation.desired, observation.observed
            while not self.stopping:
                planned = plan(desired, observed, self._state, self._limits(), self._now())
                action = next(iter(planned.actions), None)
                if earlier is not None and not does_without_a_look(planned, desired, observed):
                    break
                self._transitions.pending(planned.pending, _unserved(desired))
                if action is None:
                    return self._come_to_rest(
                        planned, desired, observed, begun_s, rest if earlier else None
                    )
                self._status.plan = planned
                desired, observed, used_up = await self._apply(action, desired, observed)
                if self._state.failures:
                    return self._state.observe_again_s
                if used_up or self._now() - begun_s > _FRESH_S:
                    break
        except LedgerUnavailable as error:
            self._transitions.failed(LEDGER_WRITE, str(error))
            return self._fail_pass(str(error))
        return self._now()

    def _last_look(
        self, rest: _Rest | None, view: LineSnapshot, desired: Desired, woken_at_s: float
    ) -> Observation | None:
        """What is desired now, on an earlier look at the engine; None if that will not do.

        Another look before a load would cost a version a third of its way. The last one stands for
        it if nothing was left to do then and that was a moment ago: the list and the incarnation
        are read again after the probe, and one that is the same was the same throughout (I4 (b),
        (d)). So it serves copies, loads, and seeing that there is nothing to do.
        """
        if rest is None or self._now() - rest.observed_at_s > self._settings.poll_interval_s:
            return None
        state = reconcile_state.note_out_of_window(self._state, desired, rest.observed, self._now())
        planned = plan(desired, rest.observed, state, self._limits(), self._now())
        if not does_without_a_look(planned, desired, rest.observed):
            return None
        self._state = state
        self._note_versions(desired, woken_at_s)
        return Observation(desired, rest.observed, view)

    def _record(self, observation: Observation, woken_at_s: float) -> None:
        status, metrics = self._status, self._metrics
        status.reconciled_at_s = self._now()
        status.desired, status.observed = observation.desired, observation.observed
        for condition, seen, gauge in (
            (LEDGER_READ, observation.desired, metrics.ledger_up),
            (ENGINE_READ, observation.observed, metrics.engine_up),
        ):
            gauge.set(not isinstance(seen, Unknown))
            if isinstance(seen, Unknown):
                self._transitions.failed(condition, seen.cause)
            else:
                self._transitions.recovered(condition)
        if isinstance(observation.desired, Unknown) or isinstance(observation.observed, Unknown):
            self._fail_pass("engine or ledger cannot be read")
        if observation.view is not None:
            self._see(observation.view)
        if isinstance(observation.desired, Desired):
            self._state = reconcile_state.note(
                self._state, observation.desired, observation.observed, self._now()
            )
            self._note_versions(observation.desired, woken_at_s)
            if isinstance(observation.observed, Known):
                self._metrics.measure(observation.desired, observation.observed)
                self._log_pause(observation.desired, observation.observed)

    def _log_pause(self, desired: Desired, observed: Known) -> None:
        if desired.paused and observed.paused is None:
            self._transitions.failed(PAUSE, f"the line is to be paused: {observed.pause_cause}")
        else:
            self._transitions.recovered(PAUSE)

    def _see(self, view: LineSnapshot) -> None:
        """Take a view of the line.

        Raises:
            StaleGeneration: the replica is not ours any more.
        """
        self.view = view
        self._membership.watch_slots(view)
        row, member = view.replicas.get(self._membership.replica), self._membership.member
        if row is None or row.generation != member.generation or row.state != "joined":
            raise StaleGeneration(f"replica {member.replica!r} is not ours any more")

    def _note_versions(self, desired: Desired, woken_at_s: float) -> None:
        versions = {v.version: v for v in (*desired.wanted, *desired.out_of_window)}
        self._first_seen_s = {n: self._first_seen_s.get(n, woken_at_s) for n in versions}
        self._loader.forget(versions)

    def _limits(self) -> Limits:
        settings = self._settings
        return Limits(
            max_loras=self._membership.max_loras,
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
        """Apply one action; return what is known after it, and whether to observe again."""
        target = getattr(action, "target", None)
        if isinstance(target, Version) and isinstance(action, (Fetch, Load, Ack)):
            seen_s = self._first_seen_s.get(target.version, self._now())
            self._loader.noticed(target.version, self._now() - seen_s)
        outcome = await self._executor.apply(action, observed)
        await self._record_outcome(action, outcome, observed)
        if isinstance(outcome, Applied) and isinstance(observed, Known):
            match action:
                case Fetch():
                    local = self._cache.local(self._copy_names(desired))
                    verified = self._cache.verified(local)
                    return desired, replace(observed, local=local, verified=verified), False
                case Load(loaded):
                    return await self._after_load(loaded, observed)
                case Unload(version) if isinstance(desired, Desired):
                    known = without_adapter(observed, version.name)
                    return after_eviction(desired, version.version), known, False
                case Free(freed):
                    return desired, without_adapter_id(observed, freed.version), False
                case _:
                    pass
        return desired, observed, True

    async def _after_load(
        self, loaded: Version, observed: Known
    ) -> tuple[Desired | Unknown, Observed, bool]:
        """What is known after an acked load: it was listed with our path in this incarnation.

        The ledger is read again: what came meanwhile goes before the next load, and the observer
        waits for this ack, of which no signal comes.
        """
        self._observer.see_loaded(loaded.version)
        view = await self._observer.read_ledger(fully=False)
        known = with_adapter(observed, loaded.name, observed.path(loaded))
        if isinstance(view, Unknown):
            return view, known, True
        self._see(view)
        return self._observer.desired(view), known, False

    async def _record_outcome(self, action: Action, outcome: Outcome, observed: Observed) -> None:
        if isinstance(outcome, Applied):
            self._transitions.recovered(LEDGER_WRITE)
            self._state = reconcile_state.pass_done(self._state)
            self._record_success(action, observed)
            return
        self._metrics.errors.labels(outcome.error).inc()
        log.debug("%s: %s", type(action).__name__, outcome.cause)
        if isinstance(outcome, Retry) and outcome.hung and isinstance(observed, Known):
            self._engine_hangs(observed.incarnation, outcome.cause)
            if outcome.broke and isinstance(action, (Load, Ack)):
                self._state = reconcile_state.engine_broke(
                    self._state, action.target.version, observed.incarnation
                )
            return
        if outcome.error == EngineTimeout.__name__:
            self._state = reconcile_state.doubted(self._state, outcome.cause)
        target = getattr(action, "target", None)
        if isinstance(action, RemoveForeign):
            self._delay(action.version, outcome.cause)
        elif isinstance(action, DeleteLocal):
            for copied in action.targets:
                self._delay(copied.version, outcome.cause)
        elif isinstance(action, DeleteOrphans):
            self._state = replace(self._state, orphaned_since_s={})  # the grace begins again
        elif isinstance(target, Version):
            await self._record_failure(action, target, outcome, observed)
        else:
            self._fail_pass(outcome.cause)

    def _record_success(self, action: Action, observed: Observed) -> None:
        match action:
            case ReportForeign(name, path) if isinstance(observed, Known):
                self._state = reconcile_state.foreign_reported(
                    self._state, observed.incarnation, name, path
                )
            case Pause() | Resume() if isinstance(observed, Known):
                ours = observed.incarnation if isinstance(action, Pause) else None
                self._state = reconcile_state.paused(self._state, ours)
            case Prove() | DeleteLocal() | DeleteOrphans():
                self._engine_answered()
            case Load(target) | Ack(target):
                self._engine_answered()
                self._state = reconcile_state.version_done(self._state, target.version)
            case Unload(target) | Reject(target):
                self._state = reconcile_state.version_done(self._state, target.version)
            case _:
                pass

    async def _record_failure(
        self, action: Action, target: Version, outcome: Retry | Rejected, observed: Observed
    ) -> None:
        first = target.version not in self._state.back_offs
        self._delay(target.version, outcome.cause)
        serves = isinstance(action, (Load, Ack)) or (
            isinstance(action, Fetch) and not action.restores
        )
        if not serves:  # a served version is not given up because its files cannot be restored
            return
        if isinstance(outcome, Rejected):
            await self._executor.report_failed(target, outcome.cause, permanent=True)
            self._state = reconcile_state.version_done(self._state, target.version)
            return
        if outcome.broke and isinstance(observed, Known):
            self._state = reconcile_state.engine_broke(
                self._state, target.version, observed.incarnation
            )
        if first:
            await self._executor.report_failed(target, outcome.cause, permanent=False)

    def _engine_answered(self) -> None:
        self._state = reconcile_state.answered(self._state, self._now())
        self._status.hang = ""
        self._metrics.engine_hung.set(0)
        self._transitions.recovered(GENERATION)

    def _engine_hangs(self, incarnation: str, cause: str) -> None:
        self._state = reconcile_state.hangs(
            self._state,
            incarnation,
            self._failure(cause),
            self._now() - self._settings.probe_timeout_s,
        )
        self._status.hang = cause
        self._metrics.engine_hung.set(1)
        self._transitions.failed(GENERATION, cause)

    def _delay(self, version: int, cause: str) -> None:
        self._state = reconcile_state.version_failed(self._state, version, self._failure(cause))

    def _failure(self, cause: str) -> FailedAttempt:
        chance = random.random()  # noqa: S311 - jitter
        return FailedAttempt(cause, self._now(), chance, self._settings.poll_interval_s)

    def _fail_pass(self, cause: str) -> float:
        """Back off; return when to reconcile again."""
        self._state = reconcile_state.pass_failed(self._state, self._failure(cause))
        return self._state.observe_again_s

    def _come_to_rest(
        self,
        planned: Plan,
        desired: Desired | Unknown,
        observed: Observed,
        observed_at_s: float,
        rest: _Rest | None,
    ) -> float:
        """Nothing is to be done; return when to reconcile again.

        Args:
            planned: the empty plan.
            desired: of the plan.
            observed: of the plan.
            observed_at_s: when the engine was observed, if it was for this.
            rest: whose observation the plan used otherwise: none later than it asked for.
        """
        until_s = min(planned.wake_at_s, observed_at_s + self._settings.poll_interval_s)
        if rest is not None:
            until_s, observed_at_s = min(until_s, rest.until_s), rest.observed_at_s
        self._status.plan = replace(planned, wake_at_s=until_s)
        self._status.desired, self._status.observed = desired, observed
        if isinstance(desired, Desired) and isinstance(observed, Known):
            self._state = reconcile_state.pass_done(self._state)
            self._rest = _Rest(desired, observed, until_s, observed_at_s)
            self._metrics.measure(desired, observed)
        return until_s

    @staticmethod
    def _copy_names(desired: Desired | Unknown) -> set[str]:
        wanted = () if isinstance(desired, Unknown) else desired.wanted
        return {version.copy_name for version in wanted}

    def _begin_fetch(self, desired: Desired, woken_at_s: float) -> None:
        """Let the copy of the next version begin while the engine is still being asked."""
        unreported = [
            version for version in desired.wanted if version.reported in {None, "evicted"}
        ]
        local = self._cache.local({v.copy_name for v in unreported}) if unreported else frozenset()
        for version in unreported:
            if version.copy_name not in local:
                if version.version not in self._state.back_offs:
                    self._loader.noticed(version.version, self._now() - woken_at_s)
                    self._loader.prefetch(version)
                return


def _unserved(desired: Desired | Unknown) -> set[str]:
    if isinstance(desired, Unknown):
        return set()
    return {v.name for v in desired.wanted if not v.acked_by(desired.incarnation)}
