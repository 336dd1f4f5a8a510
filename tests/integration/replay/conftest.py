"""A run that was served once: five versions, acked by a sidecar; each test gets a copy of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.storage import DirectoryStorage
from tests.integration.replay.stage import VERSIONS, Stage
from tests.integration.watcher.site import Site


@pytest.fixture(scope="module")
def served_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ledger and storage of a run whose sidecar has left."""
    root = tmp_path_factory.mktemp("served")
    (root / "storage").mkdir()
    url = str(root / "ledger.db")
    upgrade_url(url)
    with Ledger(url) as ledger:
        asyncio.run(_serve(Site(root, ledger, DirectoryStorage(root / "storage"))))
    return root


async def _serve(site: Site) -> None:
    async with SimulatedServer() as engine, site.sidecar(engine):
        await site.publish_and_wait(*VERSIONS)


@pytest.fixture
def stage(served_once: Path, tmp_path: Path) -> Iterator[Stage]:
    """A copy to try things with."""
    root = tmp_path / "stage"
    root.mkdir()
    shutil.copytree(served_once / "storage", root / "storage")
    shutil.copy(served_once / "ledger.db", root / "ledger.db")
    with Ledger(str(root / "ledger.db")) as ledger:
        yield Stage(root, ledger, DirectoryStorage(root / "storage"))
