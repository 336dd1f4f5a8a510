"""A site for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from policyline.ledger.db.migrate import upgrade_url
from tests.integration.router.site import Site, UnreliableLedger


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """Ledger in SQLite, storage on disk, no replica yet."""
    (tmp_path / "storage").mkdir()
    upgrade_url(str(tmp_path / "ledger.db"))
    async with AsyncExitStack() as stack:
        with UnreliableLedger(str(tmp_path / "ledger.db")) as ledger:
            yield Site(tmp_path, ledger, stack)
            await stack.aclose()
