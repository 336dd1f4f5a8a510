"""One reconcile pass: observe, plan, apply, and record the outcome."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

from policyline.ledger.errors import LedgerUnavailable, StaleGeneration
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.watcher.cache import Cache
from policyline.watcher.core import reconcile_state
from policyline.watcher.core.back_off import FailedAttempt
from policyline.watcher.core.model import (
    Ack,
    Action,
    Applied,
    DeleteLocal,
    DeleteOrphans,
    Desired,
    Fetch,
    Known,
    Limits,
    Load,
    Observed,
    Outcome,
    Pause,
    Plan,
    Prove,
    Reject,
    Rejected,
    RemoveForeign,
    ReportForeign,
    Resume,
    Retry,
    Unknown,
    Unload,
    Version,
)
from policyline.watcher.core.plan import must_observe, plan
from policyline.watcher.core.reconcile_state import ReconcileState
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


class Reconciler:
    """Reconciles. Holds the reconcile state; everything else is re-read in each pass.

    Args:
        settings: of the sidecar.
        membership: this replica in the ledger.
        observer: observes ledger, engine and disk.
        executor: applies.
        loader: knows the phases of the versions in hand.
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
        self._rest: tuple[Desired, float] | None = None
        """The desired set that is reached or waits, and when to observe again if it stays."""
        self.view: LineSnapshot | None = None
        """The newest view of the line."""
        self.stopping = False
        """Finish the action in hand and begin no other."""

    async def reconcile(self, woken_at_s: float, *, fully: bool = True) -> float | None:
        """One pass: observe, plan, and apply the plan as far as the observation carries it.

        Args:
            woken_at_s: when the change came that this pass is about.
            fully: observe even if the ledger shows nothing new, and ask it about all versions.

        Returns:
            When to reconcile again at the latest; None for at once.

        Raises:
            StaleGeneration: this watcher does not speak for the replica any more.
            WatcherError: the sidecar cannot go on.
        """
        view = await self._observer.read_ledger(fully=fully)
        if isinstance(view, LineSnapshot):
            self._see(view)
            desired = self._observer.desired(view)
            if not fully and self._rest is not None and self._rest[0] == desired:
                return self._rest[1]
            self._begin_fetch(desired, woken_at_s)
        self._rest = None
        try:
            observed_at_s = self._now()
            observation = await self._observer.complete(view)
            self._record(observation, woken_at_s)
            return await self._carry_out(observation, observed_at_s)
        except LedgerUnavailable as error:
            self._transitions.failed(LEDGER_WRITE, str(error))
            return self._fail_pass(str(error))

    async def _carry_out(self, observation: Observation, observed_at_s: float) -> float | None:
        """Plan and apply; return when to reconcile again, None for at once."""
        desired, observed = observation.desired, observation.observed
        planned = plan(desired, observed, self._state, self._limits(), self._now())
        self._status.plan = planned
        self._transitions.pending(planned.pending, _unserved(desired))
        if not planned.actions:
            return self._come_to_rest(planned, observation, observed_at_s)
        for action in planned.actions:
            if self.stopping:
                break
            applied = await self._apply(action, observed)
            if self._state.failures:
                return self._state.observe_again_s
            age_s = self._now() - observed_at_s
            if not applied or must_observe(after=action, age_s=age_s):
                break
        return None

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

    async def _apply(self, action: Action, observed: Observed) -> bool:
        """Apply one action; whether it was done."""
        target = getattr(action, "target", None)
        if isinstance(target, Version) and isinstance(action, (Fetch, Load, Ack)):
            seen_s = self._first_seen_s.get(target.version, self._now())
            self._loader.noticed(target.version, self._now() - seen_s)
        outcome = await self._executor.apply(action, observed)
        await self._record_outcome(action, outcome, observed)
        return isinstance(outcome, Applied)

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

    def _come_to_rest(self, planned: Plan, observation: Observation, observed_at_s: float) -> float:
        """Nothing is to be done; return when to reconcile again."""
        until_s = min(planned.wake_at_s, observed_at_s + self._settings.poll_interval_s)
        self._status.plan = replace(planned, wake_at_s=until_s)
        desired, observed = observation.desired, observation.observed
        if isinstance(desired, Desired) and isinstance(observed, Known):
            self._state = reconcile_state.pass_done(self._state)
            self._rest = (desired, until_s)
        return until_s

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
