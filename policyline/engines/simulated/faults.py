"""Scripted misbehaviour of the double: what goes wrong, at which call, how often."""

from dataclasses import dataclass, replace
from typing import Literal

FaultKind = Literal["fail", "hang", "delay", "lose_reply", "die", "stale", "nan", "as_base"]
"""What happens to a call:

- `fail`: it is answered with `status` and `message`, and has no effect
- `hang`: it is never answered and has no effect
- `delay`: it takes `delay_s` longer
- `lose_reply`: it takes effect, then the connection is cut without an answer
- `die`: the engine dies before it takes effect
- `stale`: the registry is listed as it was when the fault was set (call `models`)
- `nan`: the log-probabilities are NaN (call `completions`)
- `as_base`: the base model answers under the adapter's name (call `completions`)
"""

ALWAYS = -1
"""As `times`: until cleared."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the script.

    Attributes:
        call: `load`, `unload`, `models`, `completions`, `metrics`, `health`, `version`,
            `server_info`, `is_paused`, `pause`, `resume`, `collective_rpc`, `reset_prefix_cache`,
            or `*` for any.
        kind: see `FaultKind`.
        times: how many calls it hits, or `ALWAYS`.
        status: HTTP status of `fail`.
        message: text of `fail`.
        delay_s: of `delay`, in seconds.
    """

    call: str
    kind: FaultKind
    times: int = 1
    status: int = 500
    message: str = "scripted fault"
    delay_s: float = 0.0


def take(faults: list[Fault], call: str) -> Fault | None:
    """Return the first fault that fits the call, if any, and use it up by one."""
    for index, fault in enumerate(faults):
        if fault.call not in {call, "*"}:
            continue
        if fault.times == 1:
            del faults[index]
        elif fault.times > 1:
            faults[index] = replace(fault, times=fault.times - 1)
        return fault
    return None
