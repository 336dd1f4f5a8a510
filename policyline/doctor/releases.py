"""What is known of vLLM's releases: which were run, and their problems.

Sources: the contract tests, run against each of RUN, in 0.32.0 all the other tests as well; and the
source as far as adapters go (`vllm/lora`, `vllm/entrypoints`, `vllm/v1/core/kv_cache_utils.py`). Of
other releases nothing is claimed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

Release = tuple[int, int, int]

RUN: Final[tuple[Release, ...]] = ((0, 27, 1), (0, 31, 0), (0, 32, 0))
"""Releases that policyline's contract tests were run against."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a release does and that an operator should know."""

    what: str
    reference: str
    """Where it is discussed, or where it was seen."""
    first: Release | None = None
    """The first release that is known to have it; None: every earlier one may."""
    fixed: Release | None = None
    """The first release that is known not to have it; None: none yet."""
    covered: str = ""
    """Why it does no harm with policyline; empty when it does."""
    remedy: str = ""

    def concerns(self, release: Release) -> bool:
        """Whether a release has it, as far as is known."""
        return (self.first is None or self.first <= release) and (
            self.fixed is None or release < self.fixed
        )


PROBLEMS: Final[tuple[Problem, ...]] = (
    Problem(
        "a load can make decoding requests go on with another adapter's weights",
        "vllm#47724, fixed by vllm#47725; the fix is in 0.27.1",
        fixed=(0, 27, 1),
        remedy="use vLLM 0.27.1 or newer, best 0.32.0",
    ),
    Problem(
        "the prefix cache knows an adapter by its name alone, not by its path",
        "0.27.1, v1/core/kv_cache_utils.py; name and path in 0.31.0",
        fixed=(0, 31, 0),
        covered="policyline never gives a name to other bytes",
        remedy="restart vLLM before a line starts again with a new ledger",
    ),
    Problem(
        "an adapter with lora_bias, or from PiSSA, is loaded without a word",
        "seen in 0.27.1 and 0.31.0; 0.32.0 refuses it",
        fixed=(0, 32, 0),
        covered="the publisher refuses both",
    ),
    Problem(
        "unloading frees no memory: the adapter stays until others push it out",
        "vllm#54839; seen in 0.32.0",
        covered="with dev endpoints the sidecar removes it; else give --max-cpu-loras room",
    ),
    Problem(
        "load_inplace stays set: the files are read again at every step",
        "vllm#41482; seen in 0.32.0",
        covered="policyline never loads in place",
    ),
)


def parse_release(version: str) -> Release | None:
    """The numbers in `0.32.0`, `0.32.0+cpu` or `0.33`; None for a development build."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.post\d+)?(?:\+[\w.]+)?", version)
    if found is None:
        return None
    return int(found[1]), int(found[2]), int(found[3] or 0)


def problems_of(release: Release) -> tuple[Problem, ...]:
    """The known problems of a release."""
    return tuple(problem for problem in PROBLEMS if problem.concerns(release))


def shown(releases: tuple[Release, ...]) -> str:
    """As text: `0.27.1, 0.31.0`."""
    return ", ".join(".".join(map(str, release)) for release in releases)
