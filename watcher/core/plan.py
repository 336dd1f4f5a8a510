"""Decides what this replica does next; pure: no await, clock, environment, log or chance.

Three rules stand above all: unknown is not empty (I10), a desired version is never unloaded and
its files stay (I3), and one bad version never holds back a good one (I9).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from policyline.ledger.names import parse_policy_name
from policyline.watcher.core.engine_health import EngineHealth, assess, may_be_dead
from policyline.watcher.core.model import (
    Ack,
    Action,
    Announce,
    DeleteLocal,
    DeleteOrphans,
    Desired,
    Fetch,
    Free,
    Known,
    Limits,
    Load,
    Observed,
    Pending,
    PendingReason,
    Plan,
    Reject,
    RemoveForeign,
    ReportForeign,
    ReportGone,
    Unknown,
    Unload,
    Verify,
    Version,
)
from policyline.watcher.core.reconcile_state import ReconcileState

_SETTLE_S = 1.0
"""From an unload to the observation that shows whether a request is still on it."""
DEATHS_TO_QUARANTINE = 2
"""An engine that died once during a version may have died of something else."""
_FRESH_S: Final = 1.0
"""The oldest observation that an action may rely on."""
_CARRY_ON: Final = (ReportGone, ReportForeign, Reject, Fetch, Unload, Free)


def plan(
    desired: Desired | Unknown,
    observed: Observed,
    state: ReconcileState,
    limits: Limits,
    now: float,
) -> Plan:
    """Plan the actions that bring the engine to the desired set, in order.

    Args:
        desired: the ledger's view, or why there is none.
        observed: the engine's registry and the local copies, or why they are unknown.
        state: after `reconcile_state.note` for this observation.
        limits: slots and durations.
        now: monotonic time in seconds.
    """
    if isinstance(desired, Unknown):
        return Plan((), (f"ledger: {desired.cause}",), _observe_again(state, limits, now))
    if isinstance(observed, Unknown):
        return _plan_blind(desired, observed, state, limits, now)
    planner = _Planner(desired, observed, state, limits, now)
    actions = tuple(planner.actions())
    wake_at_s = min([now + limits.poll_interval_s, *planner.wakes])
    return Plan(actions, tuple(planner.reasons), wake_at_s, tuple(planner.pending))


def must_observe(*, after: Action, age_s: float) -> bool:
    """Whether the rest of a plan needs a new observation once an action is applied.

    A plan is carried out on one observation while it is fresh, through actions that change nothing
    that the later ones were planned from. A load or an ack ends it, as the next version may have
    come meanwhile, and so does all that changes whether the engine answers.

    Args:
        after: the action that was applied.
        age_s: of the observation, seconds.
    """
    return age_s > _FRESH_S or not isinstance(after, _CARRY_ON)


def _plan_blind(
    desired: Desired, observed: Unknown, state: ReconcileState, limits: Limits, now: float
) -> Plan:
    """Change nothing; a process that is gone, or long silent, has no acks that count (I4)."""
    actions: tuple[Action, ...] = ()
    why = may_be_dead(observed, state, limits, now)
    if why and desired.incarnation is not None:
        actions = (Announce(None, why),)
    pending = tuple(
        Pending(v.name, "engine", observed.cause)
        for v in desired.wanted
        if not v.acked_by(desired.incarnation) and v.reported != "rejected"
    )
    reasons = (f"engine: {observed.cause}",)
    return Plan(actions, reasons, _observe_again(state, limits, now), pending)


def _observe_again(state: ReconcileState, limits: Limits, now: float) -> float:
    latest = now + limits.poll_interval_s
    return min(latest, state.observe_again_s) if state.observe_again_s > now else latest


@dataclass(slots=True)
class _Planner:
    desired: Desired
    observed: Known
    state: ReconcileState
    limits: Limits
    now: float
    reasons: list[str] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)

    def actions(self) -> Iterator[Action]:
        """Ledger truth first, then the engine's health, loads in order, evictions, files."""
        yield from self._gone()
        health = assess(self.desired, self.observed, self.state, self.limits, self.now)
        self.reasons += health.reasons
        self.wakes += health.wakes
        incarnation = self.observed.incarnation
        if health.state != "hung" and self.desired.incarnation != incarnation:
            # nothing can be acked before the ledger knows which process is meant
            yield Announce(incarnation, "the engine runs as another incarnation")
            return
        yield from health.actions
        if health.state == "hung":
            self._mark_all_pending(health)
            return
        foreign = self._foreign()
        yield from self._report(foreign, health)
        if health.state == "runs":
            yield from self._free()
        unloads = list(self._evictable())
        yield from self._serve(foreign, unloads, health)
        yield from self._evict(unloads)
        if health.state == "runs":
            yield from self._tidy()
            yield from self._sweep()
            yield from self._verify()

    def _mark_pending(self, name: str, reason: PendingReason, why: str) -> None:
        self.pending.append(Pending(name, reason, why))
        self.reasons.append(f"{name} {why}")

    def _mark_all_pending(self, health: EngineHealth) -> None:
        for version in self.desired.wanted:
            if version.reported != "rejected" and not version.acked_by(self.desired.incarnation):
                self.pending.append(Pending(version.name, "hung", health.why))

    def _gone(self) -> Iterator[Action]:
        for version in (*self.desired.wanted, *self.desired.out_of_window):
            if version.acked_by(self.observed.incarnation) and not self.observed.lists(version):
                path = self.observed.adapters.get(version.name)
                why = "the engine does not list it any more"
                if path is not None:
                    why = f"the engine serves it from {path!r}, which is not this sidecar's copy"
                yield ReportGone(version, why)

    def _foreign(self) -> dict[int, RemoveForeign]:
        """Adapters under our line's names that this ledger did not load, by version number."""
        found: dict[int, RemoveForeign] = {}
        for name, path in self.observed.adapters.items():
            number = parse_policy_name(self.desired.line, name)
            if number is None:
                continue
            version = self.desired.version(number)
            if version is None:
                why = "the ledger has published no such version"
            elif path != self.observed.path(version):
                why = "it was loaded from another path than this watcher's copy"
            else:
                continue
            found[number] = RemoveForeign(number, name, path, why)
        return found

    def _report(self, foreign: dict[int, RemoveForeign], health: EngineHealth) -> Iterator[Action]:
        for number, removal in foreign.items():
            name, path, why = removal.name, removal.path, removal.why
            if (self.observed.incarnation, name, path) not in self.state.reported:
                yield ReportForeign(name, path, why)
            if self._must_stay(removal, health):
                continue
            if not self._is_backing_off(number, name):
                yield removal

    def _must_stay(self, removal: RemoveForeign, health: EngineHealth) -> bool:
        """Whether a foreign adapter stays for now; adds the reason and the remedy."""
        name, busy = removal.name, self.observed.busy
        if not self.limits.take_over:
            remedy = (
                "restart vLLM, or start this sidecar with --take-over to have it unloaded once no "
                "request is on it"
            )
        elif health.state != "runs" or busy is None:
            remedy = "it is removed once vLLM shows which adapters have requests"
        elif name in busy:
            remedy = "it is removed once no request is on it"
        else:
            return False
        why = f"is blocked: vLLM serves it from {removal.path!r}, {removal.why}; {remedy}"
        if any(v.name == name for v in self.desired.wanted):
            self._mark_pending(name, "blocked", why)
        else:
            self.reasons.append(f"{name} {why}")
        return True

    def _evictable(self) -> Iterator[Version]:
        """What may be unloaded, oldest first: known, ours, and out of the window or rejected."""
        out_of_window = sorted(self.desired.out_of_window, key=lambda v: v.version)
        rejected = [v for v in self.desired.wanted if v.reported == "rejected"]
        for version in (*rejected, *out_of_window):
            if self.observed.lists(version):
                yield version

    def _serve(
        self, blocked: Collection[int], unloads: list[Version], health: EngineHealth
    ) -> Iterator[Action]:
        free = self._free_slots()
        for version in self._servable():
            steps = () if version.version in blocked else tuple(self._steps(version))
            if health.state == "paused" and any(isinstance(s, (Load, Ack)) for s in steps):
                self._mark_pending(version.name, "paused", f"waits: {health.why}")
                steps = tuple(step for step in steps if isinstance(step, Fetch))
            if free is not None and any(isinstance(step, Load) for step in steps):
                while free <= 0 and unloads:
                    yield Unload(unloads.pop(0), f"its slot is needed for {version.name}")
                    free += 1
                free -= 1
            yield from steps

    def _servable(self) -> list[Version]:
        """The desired versions that are not rejected, as many as there are slots."""
        wanted = []
        for version in self.desired.wanted:
            if version.reported == "rejected":
                self._mark_pending(version.name, "rejected", "is rejected on this replica")
            else:
                wanted.append(version)
        slots = len(wanted) if self.limits.max_loras is None else self.limits.max_loras
        for version in wanted[slots:]:
            if self.observed.lists(version) and version.acked_by(self.observed.incarnation):
                continue  # from when there was room; it goes when its slot is needed
            self._mark_pending(version.name, "no_slot", f"has no slot: max_loras is {slots}")
        return wanted[:slots]

    def _free_slots(self) -> int | None:
        if self.limits.max_loras is None:
            return None
        known = (*self.desired.wanted, *self.desired.out_of_window)
        return self.limits.max_loras - sum(self.observed.lists(v) for v in known)

    def _steps(self, version: Version) -> Iterator[Action]:
        """What is left to do until a version is served; nothing while it waits."""
        deaths = self.state.deaths.get(version.version, 0)
        if deaths >= DEATHS_TO_QUARANTINE:
            yield Reject(version, f"the engine died {deaths} times while it was in hand")
            return
        listed = self.observed.lists(version)
        acked = version.acked_by(self.observed.incarnation)
        local = version.copy_name in self.observed.local
        if listed and acked and local:
            return
        if self._is_backing_off(version.version, version.name):
            if not acked:
                back_off = self.state.back_offs[version.version]
                self.pending.append(Pending(version.name, "back_off", back_off.cause))
            return
        if not local:
            why = "its files are missing on the local disk" if acked else f"it is {version.role}"
            yield Fetch(version, why, restores=acked)
        if not listed:
            yield Load(version, f"it is {version.role}")
        elif not acked:
            yield Ack(version, "the engine lists it, this incarnation holds no ack")

    def _is_backing_off(self, number: int, name: str) -> bool:
        back_off = self.state.back_offs.get(number)
        if back_off is None or back_off.not_before_s <= self.now:
            return False
        self.wakes.append(back_off.not_before_s)
        self.reasons.append(
            f"{name} waits after {back_off.attempts} failed attempts: {back_off.cause}"
        )
        return True

    def _evict(self, unloads: list[Version]) -> Iterator[Action]:
        for version in unloads:
            if self._is_backing_off(version.version, version.name):
                continue
            if version.reported == "rejected":
                yield Unload(version, "it is rejected")
                continue
            since = self.state.out_of_window_since_s.get(version.version, self.now)
            due = since + self.limits.linger_s
            if due <= self.now:
                yield Unload(version, "it is out of the window")
            else:
                self.wakes.append(due)
                self.reasons.append(f"{version.name} is out of the window and lingers")

    def _free(self) -> Iterator[Action]:
        """What is unloaded, not desired, and certainly without a request leaves the workers."""
        observed = self.observed
        rejected = [v for v in self.desired.wanted if v.reported == "rejected"]
        for version in (*rejected, *self.desired.out_of_window):
            adapter_id = observed.adapter_ids.get(version.version)
            if adapter_id is None or version.name in observed.adapters or observed.busy is None:
                continue
            if version.name in observed.busy:
                continue
            if version.role is None and version.version not in self.state.idle_since_s:
                # unloaded a moment ago: a request may have come before it
                self.wakes.append(self.now + _SETTLE_S)
            elif not self._is_backing_off(version.version, version.name):
                yield Free(version, adapter_id, "it is unloaded and no request is on it")

    def _tidy(self) -> Iterator[Action]:
        """Delete in batches, each once its oldest copy is a poll interval overdue.

        There is no hurry, and each batch costs the engine a request that shows it alive.
        """
        grace_s = self.limits.grace_s
        idle = [
            (since + grace_s, version)
            for version in self.desired.out_of_window
            if (since := self.state.idle_since_s.get(version.version)) is not None
            and not self._is_backing_off(version.version, version.name)
        ]
        if not idle:
            return
        if self.observed.over_limit:  # the oldest first, and no waiting for a batch
            yield DeleteLocal((idle[0][1],), "the copies take more than --cache-limit")
            return
        begin_at_s = min(due for due, _ in idle) + self.limits.poll_interval_s
        if begin_at_s > self.now:
            self.wakes.append(begin_at_s)
            return
        due_now = tuple(version for due, version in idle if due <= self.now)
        yield DeleteLocal(due_now, "out of the window, unloaded and without requests")

    def _sweep(self) -> Iterator[Action]:
        """What belongs to no version goes after the grace; the engine does not list it."""
        grace_s = self.limits.grace_s
        due = {path: since + grace_s for path, since in self.state.orphaned_since_s.items()}
        ripe = tuple(sorted(path for path, at in due.items() if at <= self.now))
        if ripe:
            yield DeleteOrphans(ripe, "it belongs to no version of this ledger")
        elif due:
            self.wakes.append(min(due.values()))

    def _verify(self) -> Iterator[Action]:
        """Copies that were there before our start are hashed, one at a time, when all is done."""
        verified = self.observed.verified
        for version in self.desired.wanted if verified is not None else ():
            copy_name = version.copy_name
            if copy_name in self.observed.local and copy_name not in (verified or ()):
                if not self._is_backing_off(version.version, version.name):
                    yield Verify(version, "its copy is older than this sidecar")
                return
