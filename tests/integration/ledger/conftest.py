"""One fresh, upgraded ledger per test, on SQLite and on Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from tests.postgres import PostgresServer, fresh_database, start, start_private


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server."""
    yield from start()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of an upgraded, empty ledger in SQLite."""
    url = str(tmp_path / "ledger.db")
    upgrade_url(url)
    return url


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The URL of an upgraded, empty ledger in Postgres."""
    yield from fresh_database(postgres)


@pytest.fixture
def bare_sqlite_url(tmp_path: Path) -> str:
    """The URL of a database in SQLite that is not there yet."""
    return str(tmp_path / "bare.db")


@pytest.fixture
def bare_postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The URL of an empty database in Postgres, without a schema."""
    yield from fresh_database(postgres, "template1")


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_kind(request: pytest.FixtureRequest) -> str:
    """The kinds of database."""
    kind: str = request.param
    return kind


@pytest.fixture
def ledger_url(request: pytest.FixtureRequest, ledger_kind: str) -> str:
    """The URL of an upgraded, empty ledger."""
    url: str = request.getfixturevalue(f"{ledger_kind}_url")
    return url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An open ledger."""
    with Ledger(ledger_url, actor="tester@here:1") as opened:
        yield opened


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that these tests may stop."""
    yield from start_private()


@pytest.fixture
def own_url(own_server: PostgresServer) -> Iterator[str]:
    """A ledger on it."""
    yield from fresh_database(own_server)
