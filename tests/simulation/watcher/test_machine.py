"""The state machine of the watchers.

`POLICYLINE_SIMULATION=soak` runs it for long, with new examples each time; otherwise a quick run
that is the same everywhere.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ledger.migrate import upgrade_url
from tests.simulation.watcher.machine import WatcherMachine
from tests.simulation.watcher.world import World

COMMON = settings(
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PROFILES = {
    "quick": settings(COMMON, max_examples=25, stateful_step_count=40, derandomize=True),
    "soak": settings(COMMON, max_examples=1000, stateful_step_count=100),
}
PROFILE = os.environ.get("POLICYLINE_SIMULATION", "quick")
SOAK_TIMEOUT_S = 8 * 3600


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory where there is such a place: what an fsync costs is not the question here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="policyline-sim-", dir=memory if memory.is_dir() else None
    ) as folder:
        yield Path(folder)


@pytest.mark.timeout(SOAK_TIMEOUT_S if PROFILE == "soak" else 240)
def test_whatever_happens_the_watchers_keep_the_invariants(root: Path) -> None:
    template = root / "template.db"
    upgrade_url(str(template))
    numbers = itertools.count()

    def make_world() -> World:
        folder = root / str(next(numbers))
        folder.mkdir()
        return World(folder, template)

    machine = type("Machine", (WatcherMachine,), {"make_world": staticmethod(make_world)})
    run_state_machine_as_test(machine, settings=PROFILES[PROFILE])
