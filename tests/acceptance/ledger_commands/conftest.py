"""Ledgers of both kinds, with a history, and the command that is asked about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from policyline.ledger.db.migrate import upgrade_url
from tests.acceptance.ledger_commands.command import Command, MakeUrl, fill
from tests.forking import Commands, commands
from tests.postgres import PostgresServer, fresh_database, start_private


@pytest.fixture(scope="module")
def forking() -> Iterator[Commands]:
    """Runs commands as processes."""
    with commands() as running:
        yield running


@pytest.fixture(scope="module")
def run(forking: Commands) -> Command:
    """Runs a ledger command."""
    return Command(forking)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that may be stopped."""
    yield from start_private()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def new_ledger(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    server: PostgresServer,
) -> Iterator[MakeUrl]:
    """Makes upgraded, empty ledgers of one kind."""
    with ExitStack() as stack:

        def sqlite() -> str:
            url = str(tmp_path_factory.mktemp("ledger") / "ledger.db")
            upgrade_url(url)
            return url

        def postgres() -> str:
            return stack.enter_context(contextmanager(fresh_database)(server))

        yield sqlite if request.param == "sqlite" else postgres


@pytest.fixture(scope="module")
def lived(new_ledger: MakeUrl) -> str:
    """A ledger with a history, which nobody changes."""
    url = new_ledger()
    fill(url)
    return url


@pytest.fixture
def own(new_ledger: MakeUrl) -> str:
    """A ledger with a history, to be damaged."""
    url = new_ledger()
    fill(url)
    return url
