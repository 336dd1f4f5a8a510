"""Whether the engine generates, and what is to be done about a pause or a hang; pure.

The ledger decides whether a line is paused: on a server with a sidecar, an engine that
is found paused although the ledger does not want it is resumed. One that this watcher paused is
resumed at once. One that somebody else paused has a poll interval first, because a trainer that
knows nothing of policyline pauses its server for each of its own syncs (TRL 1.16: 0.1 s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policyline.watcher.core.model import (
    Action,
    Announce,
    Desired,
    Known,
    Limits,
    Pause,
    Prove,
    Resume,
    Unknown,
)
from policyline.watcher.core.reconcile_state import ReconcileState


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How the engine stands, and what follows from it."""

    state: Literal["runs", "paused", "hung"] = "runs"
    """A paused engine answers no scored request, so nothing is probed, acked or deleted."""
    why: str = ""
    actions: tuple[Action, ...] = ()
    reasons: tuple[str, ...] = ()
    wakes: tuple[float, ...] = ()


def assess(
    desired: Desired, observed: Known, state: ReconcileState, limits: Limits, now: float
) -> EngineHealth:
    """Assess the engine from a complete observation; arguments as for `plan`."""
    if is_hung(state, observed):
        return _hung(desired, state, now)
    if desired.paused and observed.paused is None:
        runs = _alive(state, limits, now)
        why = f"the ledger wants the line paused, which cannot be done: {observed.pause_cause}"
        return EngineHealth(actions=runs.actions, reasons=(why,), wakes=runs.wakes)
    if desired.paused:
        why = "the line is paused in the ledger until: policyline ledger resume"
        pause = () if observed.paused else (Pause("the ledger wants the line paused"),)
        return EngineHealth("paused", why, pause, (why,))
    if observed.paused:
        return _paused_by_others(observed, state, limits, now)
    return _alive(state, limits, now)


def is_hung(state: ReconcileState, observed: Known) -> bool:
    """Whether this incarnation hangs; one that reports a pause does not."""
    hang = state.hang
    return hang is not None and hang.incarnation == observed.incarnation and not observed.paused


def may_be_dead(observed: Unknown, state: ReconcileState, limits: Limits, now: float) -> str:
    """Why no ack of an engine counts that cannot be observed; empty when they still do."""
    if observed.gone:
        return f"the engine is gone: {observed.cause}"
    since_s = state.silent_since_s
    if since_s is not None and now - since_s >= limits.silent_s:
        return f"the engine has not answered for {now - since_s:.0f} s: {observed.cause}"
    return ""


def _hung(desired: Desired, state: ReconcileState, now: float) -> EngineHealth:
    hang = state.hang
    assert hang is not None
    why = f"the engine hangs: {hang.cause}"
    actions: list[Action] = []
    wakes: tuple[float, ...] = ()
    if desired.incarnation is not None:
        actions.append(Announce(None, why))
    if hang.not_before_s <= now:
        actions.append(Prove("whether it answers again"))
    else:
        wakes = (hang.not_before_s,)
    return EngineHealth("hung", why, tuple(actions), (why,), wakes)


def _paused_by_others(
    observed: Known, state: ReconcileState, limits: Limits, now: float
) -> EngineHealth:
    ours = state.paused_here == observed.incarnation
    since_s = now if state.paused_since_s is None else state.paused_since_s
    due_s = now if ours else since_s + limits.poll_interval_s
    why = "vLLM is paused, and the ledger does not want it"
    if due_s <= now:
        return EngineHealth("paused", why, (Resume(why),), (why,))
    return EngineHealth("paused", why, (), (f"{why}: resumed in {due_s - now:.1f} s",), (due_s,))


def _alive(state: ReconcileState, limits: Limits, now: float) -> EngineHealth:
    """A scored request when it is due, or at once when there is a doubt."""
    if state.doubt:
        return EngineHealth(actions=(Prove(state.doubt),))
    seen_s = now if state.alive_at_s is None else state.alive_at_s
    due_s = seen_s + limits.probe_interval_s
    if due_s <= now:
        return EngineHealth(actions=(Prove(f"the last answer is {now - seen_s:.0f} s old"),))
    return EngineHealth(wakes=(due_s,))
