"""A fresh site for each test: ledger in SQLite or Postgres, storage on disk, nothing published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db import connect as connections
from policyline.ledger.db.migrate import upgrade_url
from policyline.storage import DirectoryStorage
from tests.integration.watcher.site import Site
from tests.postgres import fresh_database, start


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Everything but an engine, which is the fixture `double`."""
    yield from _site(tmp_path)


@pytest.fixture
def impatient_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The same, and a locked ledger counts as away after 0.3 s."""
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.3)
    yield from _site(tmp_path)


@pytest.fixture
def postgres_site(tmp_path: Path) -> Iterator[Site]:
    """The same, with the ledger in Postgres."""
    with contextmanager(start)() as server, contextmanager(fresh_database)(server) as url:
        yield from _site(tmp_path, url)


def _site(root: Path, url: str | None = None) -> Iterator[Site]:
    (root / "storage").mkdir()
    url = url or str(root / "ledger.db")
    upgrade_url(url)
    with Ledger(url) as ledger:
        yield Site(root, ledger, DirectoryStorage(root / "storage"))
