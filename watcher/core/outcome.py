"""What came of an action."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Applied:
    """It was done."""


@dataclass(frozen=True, slots=True)
class Retry:
    """It was not done, and may be tried again later."""

    cause: str
    error: str = "check"
    """Kind of error, for the metrics; `check` when what was seen is not what should be."""
    broke: bool = False
    """The engine broke off: if it comes back as another incarnation, it died of this."""
    hung: bool = False
    """The engine did not answer a scored request, and did no step meanwhile."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """It will never work: the version is wrong."""

    cause: str
    error: str


Outcome = Applied | Retry | Rejected
