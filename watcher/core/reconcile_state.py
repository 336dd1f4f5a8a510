"""What the watcher remembers between two observations, and how it changes; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from policyline.watcher.core.back_off import BackOff, FailedAttempt
from policyline.watcher.core.model import Desired, Known, Observed, Unknown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CrashSuspect:
    """The version that was being loaded when a call to the engine broke."""

    version: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Hang:
    """An engine that does not answer a scored request, although its server answers others."""

    incarnation: str
    cause: str
    attempts: int
    not_before_s: float


@dataclass(frozen=True, slots=True)
class ReconcileState:
    """What the watcher remembers between two observations; times are of its monotonic clock."""

    back_offs: Mapping[int, BackOff] = field(default_factory=dict)
    out_of_window_since_s: Mapping[int, float] = field(default_factory=dict)
    """When a version that the engine lists was first seen out of the window."""
    idle_since_s: Mapping[int, float] = field(default_factory=dict)
    """Since when a version is out of the window, unlisted and without a request, without a gap."""
    reported: frozenset[tuple[str, str, str]] = frozenset()
    """(incarnation, name, path) of the foreign adapters that were reported."""
    paused_since_s: float | None = None
    """Since when the engine is seen paused, without a gap."""
    alive_at_s: float | None = None
    """When the engine last answered a scored request; before the first, when it was first seen."""
    doubt: str = ""
    """Why it must prove now that it generates: a call was not answered in time."""
    hang: Hang | None = None
    silent_since_s: float | None = None
    """Since when it gives no answer at all, without a gap."""
    paused_here: str | None = None
    """The incarnation that this watcher paused itself."""
    orphaned_since_s: Mapping[str, float] = field(default_factory=dict)
    """Since when a copy belongs to no version and is not needed, seen without a gap; by path."""
    suspect: CrashSuspect | None = None
    deaths: Mapping[int, int] = field(default_factory=dict)
    """How often the engine died while the version was being loaded."""
    failures: int = 0
    """Passes in a row that failed on no version's account: engine or ledger is unreachable."""
    observe_again_s: float = 0.0
    """When to observe again after a failed pass."""


def note(state: ReconcileState, desired: Desired, observed: Observed, now: float) -> ReconcileState:
    """Note an observation: what is out of the window or idle, and what crashed the engine."""
    state = _note_liveness(state, observed, now)
    if isinstance(observed, Unknown):
        return replace(state, idle_since_s={}, orphaned_since_s={})
    numbers = {v.version for v in (*desired.wanted, *desired.out_of_window)}
    state = _judge_crash_suspect(state, observed)
    listed = {v.version for v in desired.out_of_window if observed.lists(v)}
    return replace(
        state,
        out_of_window_since_s={n: state.out_of_window_since_s.get(n, now) for n in listed},
        back_offs=_keep(state.back_offs, numbers),
        deaths=_keep(state.deaths, numbers),
        idle_since_s={n: state.idle_since_s.get(n, now) for n in _idle(desired, observed)},
        orphaned_since_s={
            p: state.orphaned_since_s.get(p, now) for p in orphans(desired, observed)
        },
        reported=frozenset(r for r in state.reported if r[0] == observed.incarnation),
    )


def _note_liveness(state: ReconcileState, observed: Observed, now: float) -> ReconcileState:
    """Since when the engine is silent or paused, and whether it must prove that it generates."""
    if isinstance(observed, Unknown):
        silent_since_s = now if state.silent_since_s is None else state.silent_since_s
        return replace(
            state,
            silent_since_s=silent_since_s if observed.silent else None,
            doubt=observed.cause if observed.silent else state.doubt,
            paused_since_s=None,
        )
    hang, since_s = state.hang, state.paused_since_s
    ours = state.paused_here == observed.incarnation and observed.paused
    return replace(
        state,
        silent_since_s=None,
        alive_at_s=now if state.alive_at_s is None else state.alive_at_s,
        doubt="" if observed.paused else state.doubt or observed.unanswered,
        hang=None if observed.paused or _is_of_another_incarnation(hang, observed) else hang,
        paused_since_s=(now if since_s is None else since_s) if observed.paused else None,
        paused_here=observed.incarnation if ours else None,
    )


def _is_of_another_incarnation(hang: Hang | None, observed: Known) -> bool:
    return hang is not None and hang.incarnation != observed.incarnation


def answered(state: ReconcileState, now: float) -> ReconcileState:
    """The engine answered a scored request."""
    return replace(state, alive_at_s=now, doubt="", hang=None)


def doubted(state: ReconcileState, cause: str) -> ReconcileState:
    """A call was not answered in time."""
    return replace(state, doubt=cause)


def hangs(
    state: ReconcileState, incarnation: str, failure: FailedAttempt, since_s: float
) -> ReconcileState:
    """The engine has answered nothing since then: its acks are void (I4).

    If its server is silent in the next observation too, that silence began then.
    """
    former = state.hang
    attempts = 1 if former is None else former.attempts + 1
    hang = Hang(incarnation, failure.cause, attempts, failure.retry_at_s(attempts))
    return replace(state, hang=hang, doubt="", silent_since_s=since_s)


def paused(state: ReconcileState, incarnation: str | None) -> ReconcileState:
    """This watcher paused the incarnation, or with None resumed it."""
    return replace(state, paused_here=incarnation, paused_since_s=None)


def _judge_crash_suspect(state: ReconcileState, observed: Known) -> ReconcileState:
    """A call that broke was a death once another incarnation is seen.

    The same one proves nothing: for some milliseconds a dead vLLM still answers (0.32).
    """
    suspect = state.suspect
    if suspect is None or suspect.incarnation == observed.incarnation:
        return state
    deaths = state.deaths.get(suspect.version, 0) + 1
    return replace(state, suspect=None, deaths={**state.deaths, suspect.version: deaths})


def _idle(desired: Desired, observed: Known) -> set[int]:
    """Out of the window, not listed, with a local copy, and certainly without a request."""
    if observed.busy is None:
        return set()
    return {
        v.version
        for v in desired.out_of_window
        if v.copy_name in observed.local
        and v.name not in observed.adapters
        and v.name not in observed.busy
    }


def orphans(desired: Desired, observed: Known) -> set[str]:
    """Paths of the copies that belong to no version and that the engine certainly does not need.

    None when nothing is desired: an empty ledger is no reason to delete (I10).
    """
    if observed.busy is None or not desired.wanted:
        return set()
    ours = {v.copy_name for v in (*desired.wanted, *desired.out_of_window)}
    needed = (*observed.adapters, *observed.busy)
    found = {
        f"{observed.home}/{copy_name}"
        for copy_name in observed.local - ours
        if copy_name.rpartition("-")[0] not in needed
    }
    if not observed.busy:  # requests on adapters of another ledger have names of this line too
        found |= observed.stale_caches
    listed = observed.adapters.values()
    return {p for p in found if not any(x == p or x.startswith(f"{p}/") for x in listed)}


def _keep(mapping: Mapping[int, T], numbers: set[int]) -> dict[int, T]:
    return {n: value for n, value in mapping.items() if n in numbers}


def _without(mapping: Mapping[int, T], version: int) -> dict[int, T]:
    return {n: value for n, value in mapping.items() if n != version}


def pass_failed(state: ReconcileState, failure: FailedAttempt) -> ReconcileState:
    """A pass failed on no version's account: observe again after a growing delay."""
    failures = state.failures + 1
    return replace(state, failures=failures, observe_again_s=failure.retry_at_s(failures))


def pass_done(state: ReconcileState) -> ReconcileState:
    """A pass did what it planned."""
    return replace(state, failures=0, observe_again_s=0.0)


def version_failed(state: ReconcileState, version: int, failure: FailedAttempt) -> ReconcileState:
    """An attempt on a version failed and may be repeated."""
    former = state.back_offs.get(version)
    attempts = 1 if former is None else former.attempts + 1
    back_off = BackOff(attempts, failure.retry_at_s(attempts), failure.cause)
    return replace(state, back_offs={**state.back_offs, version: back_off})


def version_done(state: ReconcileState, version: int) -> ReconcileState:
    """A version is served or given up: forget its back-off, suspicion and idleness."""
    suspect = state.suspect
    return replace(
        state,
        back_offs=_without(state.back_offs, version),
        deaths=_without(state.deaths, version),
        idle_since_s=_without(state.idle_since_s, version),
        suspect=None if suspect is not None and suspect.version == version else suspect,
    )


def engine_broke(state: ReconcileState, version: int, incarnation: str) -> ReconcileState:
    """A call about a version broke; the next observation shows whether the engine died of it."""
    return replace(state, suspect=CrashSuspect(version, incarnation))


def foreign_reported(
    state: ReconcileState, incarnation: str, name: str, path: str
) -> ReconcileState:
    """A foreign adapter is in the ledger now."""
    return replace(state, reported=state.reported | {(incarnation, name, path)})
