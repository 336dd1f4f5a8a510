"""The state machine on both databases; `tests.simulation.pieces` says how long it runs."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from policyline.ledger import checkpoint
from policyline.ledger.append import unit_of_work
from policyline.ledger.db.migrate import upgrade_url
from tests.postgres import PostgresServer, fresh_database
from tests.simulation.ledger.machine import LedgerMachine
from tests.simulation.pieces import run, timeout_s

COMMON = settings(
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
QUICK = {
    "sqlite": settings(COMMON, max_examples=40, stateful_step_count=40, derandomize=True),
    "postgres": settings(COMMON, max_examples=12, stateful_step_count=40, derandomize=True),
}

Places = Callable[[], AbstractContextManager[str]]


@pytest.fixture
def places(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Places:
    """Makes a fresh database for each example."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return lambda: contextmanager(fresh_database)(server)
    template = tmp_path / "template.db"
    upgrade_url(str(template))
    numbers = itertools.count()

    @contextmanager
    def fresh_file() -> Iterator[str]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        shutil.copy(template, folder / "ledger.db")
        yield str(folder / "ledger.db")
        shutil.rmtree(folder)

    return fresh_file


@pytest.mark.timeout(timeout_s(600))  # shrinking takes its time
@pytest.mark.parametrize(("places", "kind"), [(k, k) for k in QUICK], indirect=["places"])
def test_every_verb_in_any_order_keeps_the_invariants(
    places: Places, kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """I1, I5, I6, I7, the readiness rules, and a ledger that verifies after each step."""
    for module in (checkpoint, unit_of_work):
        monkeypatch.setattr(module, "CHECKPOINT_EVERY", 7)
    machine = type("Machine", (LedgerMachine,), {"place": staticmethod(places)})
    run(machine, QUICK[kind], request)
