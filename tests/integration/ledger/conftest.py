"""One fresh, upgraded ledger per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ledger import Ledger
from ledger.migrate import upgrade_url


@pytest.fixture
def ledger_url(tmp_path: Path) -> str:
    """The URL of an upgraded, empty ledger."""
    url = str(tmp_path / "ledger.db")
    upgrade_url(url)
    return url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An open ledger."""
    with Ledger(ledger_url, actor="tester@here:1") as opened:
        yield opened
