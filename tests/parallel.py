"""Several workers (pytest-xdist): which tests stay together, in which order, and which run alone.

A file is one unit of work, as its tests may share what is dear to start. A test on the real engine
is a unit of its own, unless a mark `xdist_group` says with whom it shares a server. The engine's
come first, since they take longest, and what is marked `alone` comes last.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def is_worker() -> bool:
    """Whether other workers run tests at the same time."""
    return "PYTEST_XDIST_WORKER" in os.environ


def arrange(items: list[pytest.Item]) -> None:
    """Group and sort; every worker must come to the same order."""
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
        elif not item.get_closest_marker("xdist_group") and not _is_engine(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: 2 if item.get_closest_marker("alone") else not _is_engine(item))


def _is_engine(item: pytest.Item) -> bool:
    return item.get_closest_marker("engine") is not None


@contextmanager
def turn(common: Path, *, alone: bool) -> Iterator[None]:
    """A test's turn: beside those of other workers, or alone.

    Args:
        common: a directory that all workers see.
        alone: wait for the others' tests to end, and let none begin meanwhile.
    """
    with (common / "turnstile").open("w") as turnstile, (common / "running").open("w") as running:
        # who waits for the others holds the turnstile, so that they cannot go on for ever
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # also if a child has inherited the file


@contextmanager
def once(common: Path, name: str) -> Iterator[None]:
    """Hold a lock by this name, for what one worker makes for all."""
    with (common / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
