"""Whether the engine generates, and what is to be done about a pause or a hang; pure.

The ledger says whether a line is paused, and on a server with a sidecar it rules: an engine that
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
    Memory,
    Pause,
    Prove,
    Resume,
    Unknown,
)


@dataclass(frozen=True, slots=True)
class Standing:
    """How the engine stands, and what follows from it."""

    state: Literal["runs", "paused", "hung"] = "runs"
    """A paused engine answers no scored request, so nothing is probed, acked or deleted."""
    why: str = ""
    actions: tuple[Action, ...] = ()
    reasons: tuple[str, ...] = ()
    wakes: tuple[float, ...] = ()


def stand(
    desired: Desired, observed: Known, memory: Memory, limits: Limits, now: float
) -> Standing:
    """Judge the engine from a complete look at it; arguments as for `plan`."""
    if is_hung(memory, observed):
        return _hung(desired, memory, now)
    if desired.paused and observed.paused is None:
        runs = _alive(memory, limits, now)
        why = f"the ledger wants the line paused, which cannot be done: {observed.pause_cause}"
        return Standing(actions=runs.actions, reasons=(why,), wakes=runs.wakes)
    if desired.paused:
        why = "the line is paused in the ledger until: policyline ledger resume"
        pause = () if observed.paused else (Pause("the ledger wants the line paused"),)
        return Standing("paused", why, pause, (why,))
    if observed.paused:
        return _paused_by_others(observed, memory, limits, now)
    return _alive(memory, limits, now)


def is_hung(memory: Memory, observed: Known) -> bool:
    """Whether this life of the engine hangs; one that tells of a pause does not."""
    hang = memory.hang
    return hang is not None and hang.incarnation == observed.incarnation and not observed.paused


def may_be_dead(observed: Unknown, memory: Memory, limits: Limits, now: float) -> str:
    """Why no ack of an engine counts that cannot be observed; empty when they still do."""
    if observed.gone:
        return f"the engine is gone: {observed.cause}"
    since_s = memory.silent_since_s
    if since_s is not None and now - since_s >= limits.silent_s:
        return f"the engine has not answered for {now - since_s:.0f} s: {observed.cause}"
    return ""


def _hung(desired: Desired, memory: Memory, now: float) -> Standing:
    hang = memory.hang
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
    return Standing("hung", why, tuple(actions), (why,), wakes)


def _paused_by_others(observed: Known, memory: Memory, limits: Limits, now: float) -> Standing:
    ours = memory.paused_here == observed.incarnation
    since_s = now if memory.paused_since_s is None else memory.paused_since_s
    due_s = now if ours else since_s + limits.poll_interval_s
    why = "vLLM is paused, and the ledger does not want it"
    if due_s <= now:
        return Standing("paused", why, (Resume(why),), (why,))
    return Standing("paused", why, (), (f"{why}: resumed in {due_s - now:.1f} s",), (due_s,))


def _alive(memory: Memory, limits: Limits, now: float) -> Standing:
    """A proof of life when it is due, or at once when there is a doubt."""
    if memory.doubt:
        return Standing(actions=(Prove(memory.doubt),))
    seen_s = now if memory.alive_at_s is None else memory.alive_at_s
    due_s = seen_s + limits.probe_interval_s
    if due_s <= now:
        return Standing(actions=(Prove(f"the last answer is {now - seen_s:.0f} s old"),))
    return Standing(wakes=(due_s,))
