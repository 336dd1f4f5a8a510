"""How the watcher's memory changes; pure. Time and chance are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from watcher.model import Desired, Known, Memory, Observed, Suspect, Trouble, Unknown

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
    if isinstance(observed, Unknown):
        return replace(memory, idle_since_s={})
    numbers = {v.version for v in (*desired.wanted, *desired.outside)}
    listed = {v.version for v in desired.outside if observed.lists(v)}
    memory = _judge_suspect(memory, observed)
    return replace(
        memory,
        troubles=_keep(memory.troubles, numbers),
        deaths=_keep(memory.deaths, numbers),
        outside_since_s={n: memory.outside_since_s.get(n, now) for n in listed},
        idle_since_s={n: memory.idle_since_s.get(n, now) for n in _idle(desired, observed)},
        reported=frozenset(r for r in memory.reported if r[0] == observed.incarnation),
    )


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


def _keep(mapping: Mapping[int, T], numbers: set[int]) -> dict[int, T]:
    return {n: value for n, value in mapping.items() if n in numbers}


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
    """A version is served or given up: its troubles are over, and no suspicion is left."""
    suspect = memory.suspect
    return replace(
        memory,
        troubles={n: t for n, t in memory.troubles.items() if n != version},
        deaths={n: d for n, d in memory.deaths.items() if n != version},
        suspect=None if suspect is not None and suspect.version == version else suspect,
    )


def engine_broke(memory: Memory, version: int, incarnation: str) -> Memory:
    """A call about a version broke; the next look tells whether the engine died of it."""
    return replace(memory, suspect=Suspect(version, incarnation))


def foreign_reported(memory: Memory, incarnation: str, name: str, path: str) -> Memory:
    """A foreign adapter is in the ledger now."""
    return replace(memory, reported=memory.reported | {(incarnation, name, path)})
