"""The state machine of the watchers; `tests.simulation.pieces` says how long it runs."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from policyline.ledger.db.migrate import upgrade_url
from tests.simulation.pieces import run, timeout_s
from tests.simulation.watcher.machine import WatcherMachine
from tests.simulation.watcher.world import World

COMMON = settings(
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
QUICK = settings(COMMON, max_examples=25, stateful_step_count=40, derandomize=True)


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory where there is such a place: what an fsync costs is not the question here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="policyline-sim-", dir=memory if memory.is_dir() else None
    ) as folder:
        yield Path(folder)


@pytest.fixture
def places(root: Path) -> Callable[[], tuple[Path, Path]]:
    """Makes an empty directory for each world, and an upgraded, empty ledger."""
    template = root / "template.db"
    upgrade_url(str(template))
    numbers = itertools.count()

    def make_place() -> tuple[Path, Path]:
        folder = root / str(next(numbers))
        folder.mkdir()
        return folder, template

    return make_place


@pytest.mark.timeout(timeout_s(600))  # shrinking takes its time
def test_whatever_happens_the_watchers_keep_the_invariants(
    places: Callable[[], tuple[Path, Path]], request: pytest.FixtureRequest
) -> None:
    make_world = staticmethod(lambda: World(*places()))
    machine = type("Machine", (WatcherMachine,), {"make_world": make_world})
    run(machine, QUICK, request)


@pytest.mark.timeout(timeout_s(120))
def test_the_same_choices_make_the_same_run(places: Callable[[], tuple[Path, Path]]) -> None:
    """Else a failure could not be shrunk, nor be seen again."""
    stories: list[list[str]] = []

    class Told(World):
        def close(self) -> None:
            stories.append([*self.history, *(f"{e.seq} {e.kind}" for e in self.ledger.events())])
            super().close()

    machine = type(
        "Machine", (WatcherMachine,), {"make_world": staticmethod(lambda: Told(*places()))}
    )
    few = settings(QUICK, max_examples=6, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=few)
    first = stories.copy()
    stories.clear()
    run_state_machine_as_test(machine, settings=few)

    assert sum(map(len, first)) > 1000
    assert stories == first
