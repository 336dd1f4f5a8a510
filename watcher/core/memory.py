"""How the watcher's memory changes; pure. Time and chance are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from policyline.watcher.core.model import (
    Desired,
    Hang,
    Known,
    Memory,
    Observed,
    Suspect,
    Trouble,
    Unknown,
)

FIRST_DELAY_S = 0.2
"""Back-off before the second attempt; doubled for each further one."""

T = TypeVar("T")


def next_delay_s(attempts: int, chance: float, cap_s: float) -> float:
    """Seconds to wait after the `attempts`-th failure in a row.

    Args:
        attempts: 1 or more.
        chance: from [0, 1); the delay is between half and all of the doubled base, so that
            replicas that failed together do not return together.
        cap_s: the longest delay.
    """
    doubled = FIRST_DELAY_S * 2.0 ** min(attempts - 1, 30)
    return min(cap_s, doubled) * (0.5 + chance / 2)


@dataclass(frozen=True, slots=True)
class Failure:
    """The circumstances of a failed attempt."""

    cause: str
    now: float
    """Monotonic, seconds."""
    chance: float
    """From [0, 1)."""
    cap_s: float
    """The longest back-off."""

    def retry_at_s(self, attempts: int) -> float:
        """When to try again after so many failures in a row."""
        return self.now + next_delay_s(attempts, self.chance, self.cap_s)


def note(memory: Memory, desired: Desired, observed: Observed, now: float) -> Memory:
    """Take a look into account: what is outside or idle since when, and who is a suspect."""
    memory = _note_life(memory, observed, now)
    if isinstance(observed, Unknown):
        return replace(memory, idle_since_s={}, stray_since_s={})
    numbers = {v.version for v in (*desired.wanted, *desired.outside)}
    memory = note_outside(_judge_suspect(memory, observed), desired, observed, now)
    return replace(
        memory,
        troubles=_keep(memory.troubles, numbers),
        deaths=_keep(memory.deaths, numbers),
        idle_since_s={n: memory.idle_since_s.get(n, now) for n in _idle(desired, observed)},
        stray_since_s={p: memory.stray_since_s.get(p, now) for p in strays(desired, observed)},
        reported=frozenset(r for r in memory.reported if r[0] == observed.incarnation),
    )


def note_outside(memory: Memory, desired: Desired, observed: Known, now: float) -> Memory:
    """Take into account what is listed outside, which an earlier look shows as well."""
    listed = {v.version for v in desired.outside if observed.lists(v)}
    since_s = {n: memory.outside_since_s.get(n, now) for n in listed}
    return replace(memory, outside_since_s=since_s)


def _note_life(memory: Memory, observed: Observed, now: float) -> Memory:
    """Since when the engine is silent or paused, and whether it must show that it lives."""
    if isinstance(observed, Unknown):
        silent_since_s = now if memory.silent_since_s is None else memory.silent_since_s
        return replace(
            memory,
            silent_since_s=silent_since_s if observed.silent else None,
            doubt=observed.cause if observed.silent else memory.doubt,
            paused_since_s=None,
        )
    hang, since_s = memory.hang, memory.paused_since_s
    ours = memory.paused_here == observed.incarnation and observed.paused
    return replace(
        memory,
        silent_since_s=None,
        alive_at_s=now if memory.alive_at_s is None else memory.alive_at_s,
        doubt="" if observed.paused else memory.doubt or observed.unanswered,
        hang=None if observed.paused or _is_of_another_life(hang, observed) else hang,
        paused_since_s=(now if since_s is None else since_s) if observed.paused else None,
        paused_here=observed.incarnation if ours else None,
    )


def _is_of_another_life(hang: Hang | None, observed: Known) -> bool:
    return hang is not None and hang.incarnation != observed.incarnation


def answered(memory: Memory, now: float) -> Memory:
    """The engine answered a scored request."""
    return replace(memory, alive_at_s=now, doubt="", hang=None)


def doubted(memory: Memory, cause: str) -> Memory:
    """A call was not answered in time."""
    return replace(memory, doubt=cause)


def hangs(memory: Memory, incarnation: str, failure: Failure, since_s: float) -> Memory:
    """The engine has answered nothing since then: its acks are void (I4).

    Also if its server is silent at the next look: that is then no silence that has just begun.
    """
    former = memory.hang
    attempts = 1 if former is None else former.attempts + 1
    hang = Hang(incarnation, failure.cause, attempts, failure.retry_at_s(attempts))
    return replace(memory, hang=hang, doubt="", silent_since_s=since_s)


def paused(memory: Memory, incarnation: str | None) -> Memory:
    """This watcher paused the incarnation, or with None resumed it."""
    return replace(memory, paused_here=incarnation, paused_since_s=None)


def _judge_suspect(memory: Memory, observed: Known) -> Memory:
    """A call that broke was a death once another incarnation is seen.

    The same one proves nothing: for some milliseconds a dead vLLM still answers (0.32).
    """
    suspect = memory.suspect
    if suspect is None or suspect.incarnation == observed.incarnation:
        return memory
    deaths = memory.deaths.get(suspect.version, 0) + 1
    return replace(memory, suspect=None, deaths={**memory.deaths, suspect.version: deaths})


def _idle(desired: Desired, observed: Known) -> set[int]:
    """Outside, not listed, with a local copy, and certainly without a request."""
    if observed.busy is None:
        return set()
    return {
        v.version
        for v in desired.outside
        if v.place in observed.local
        and v.name not in observed.adapters
        and v.name not in observed.busy
    }


def strays(desired: Desired, observed: Known) -> set[str]:
    """Paths of the copies that belong to no version and that the engine certainly does not need.

    None when nothing is desired: an empty ledger is no reason to delete (I10).
    """
    if observed.busy is None or not desired.wanted:
        return set()
    ours = {v.place for v in (*desired.wanted, *desired.outside)}
    needed = (*observed.adapters, *observed.busy)
    found = {
        f"{observed.home}/{place}"
        for place in observed.local - ours
        if place.rpartition("-")[0] not in needed
    }
    if not observed.busy:  # requests on adapters of another ledger have names of this line too
        found |= observed.leftovers
    listed = observed.adapters.values()
    return {p for p in found if not any(x == p or x.startswith(f"{p}/") for x in listed)}


def _keep(mapping: Mapping[int, T], numbers: set[int]) -> dict[int, T]:
    return {n: value for n, value in mapping.items() if n in numbers}


def _without(mapping: Mapping[int, T], version: int) -> dict[int, T]:
    return {n: value for n, value in mapping.items() if n != version}


def turn_failed(memory: Memory, failure: Failure) -> Memory:
    """A turn of the loop failed for no version's sake: look again later, ever more rarely."""
    failures = memory.failures + 1
    return replace(memory, failures=failures, look_again_s=failure.retry_at_s(failures))


def turn_done(memory: Memory) -> Memory:
    """A turn of the loop did what it wanted."""
    return replace(memory, failures=0, look_again_s=0.0)


def version_failed(memory: Memory, version: int, failure: Failure) -> Memory:
    """An attempt on a version failed and may be repeated."""
    former = memory.troubles.get(version)
    attempts = 1 if former is None else former.attempts + 1
    trouble = Trouble(attempts, failure.retry_at_s(attempts), failure.cause)
    return replace(memory, troubles={**memory.troubles, version: trouble})


def version_done(memory: Memory, version: int) -> Memory:
    """A version is served or given up: troubles, suspicion and idleness are over."""
    suspect = memory.suspect
    return replace(
        memory,
        troubles=_without(memory.troubles, version),
        deaths=_without(memory.deaths, version),
        idle_since_s=_without(memory.idle_since_s, version),
        suspect=None if suspect is not None and suspect.version == version else suspect,
    )


def engine_broke(memory: Memory, version: int, incarnation: str) -> Memory:
    """A call about a version broke; the next look tells whether the engine died of it."""
    return replace(memory, suspect=Suspect(version, incarnation))


def foreign_reported(memory: Memory, incarnation: str, name: str, path: str) -> Memory:
    """A foreign adapter is in the ledger now."""
    return replace(memory, reported=memory.reported | {(incarnation, name, path)})
