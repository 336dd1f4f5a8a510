"""What every check ends in, and what a measurement that failed leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from policyline.errors import ExitCode, PolicylineError

Status = Literal["pass", "warn", "fail", "skip", "note"]
"""`note`: a fact that nothing depends on; `skip`: not measured, and why."""


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one check."""

    status: Status
    name: str
    """Stable, `area.what`: scripts may rely on it."""
    value: str
    """What was measured, or why nothing was."""
    remedy: str = ""
    """What to do, as an imperative; empty where there is nothing to do."""
    unreachable: bool = False
    """It failed because nobody answered."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A measurement that gave no value."""

    cause: str
    hint: str = ""
    unreachable: bool = False


class Unreadable(PolicylineError):
    """What an answer is to be made from cannot be read, and there is no report to put that in."""


class Unanswered(Unreadable):
    """Nobody answered."""

    exit_code = ExitCode.UNREACHABLE


@dataclass(frozen=True, slots=True)
class Report:
    """All lines, in the order of the checks."""

    lines: tuple[Line, ...] = field(default_factory=tuple)

    @property
    def exit_code(self) -> ExitCode:
        """3 when something that was given did not answer, 1 when a check failed, else 0.

        The former goes first: what was not seen may be wrong as well.
        """
        if any(line.unreachable for line in self.lines):
            return ExitCode.UNREACHABLE
        if any(line.status == "fail" for line in self.lines):
            return ExitCode.FAILED
        return ExitCode.DONE


class Window(NamedTuple):
    """How many adapter slots a run needs, and where that is from."""

    max_staleness: int
    source: str
    """As shown: `--max-staleness`, `run 'grpo-7'` or `default`."""

    @property
    def slots(self) -> int:
        """Current, the `max_staleness` before it, and the candidate on its way."""
        return self.max_staleness + 2


def failed(name: str, failure: Failure) -> Line:
    """The line of a measurement that gave no value."""
    return Line("fail", name, failure.cause, failure.hint, unreachable=failure.unreachable)


def joined(parts: Sequence[str], most: int = 3) -> str:
    """The first few of several names, and how many more there are."""
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more
