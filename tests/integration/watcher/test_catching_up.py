"""Behind the others: late, far behind, with a slow disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import EngineFacts, RunSettings
from policyline.ledger.manifest import FileEntry, Manifest
from policyline.storage import DirectoryStorage
from policyline.watcher.core import plan
from tests.integration.watcher.site import Site
from tests.ledger_builders import acknowledge

LINE = "trl-policy"


class SlowStorage(DirectoryStorage):
    """A mount on which no copy ends before it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def fetch(self, name: str, entries: Sequence[FileEntry], into: Path) -> None:
        """Copy, and wait."""
        self.begun.set()
        self.may_end.wait()
        super().fetch(name, entries, into)


@pytest.fixture
def slow(site: Site) -> SlowStorage:
    return SlowStorage(site.storage.root)


async def test_fifty_versions_behind_it_loads_the_window_and_nothing_else(
    site: Site, double: SimulatedServer
) -> None:
    """Current first; of what was current before the window it does not even fetch a byte."""
    other = site.ledger.join(LINE, "other", EngineFacts("1.0"))
    for seed in range(1, 51):
        await site.publish(seed)
        manifest = Manifest.from_text(site.ledger.version(LINE, seed).manifest or "")
        await asyncio.to_thread(acknowledge, site.ledger, other, manifest, "1.0")
    site.ledger.leave(other, "only its acks were needed")

    async with site.sidecar(double) as late:
        await site.until(lambda v: all("r0" in v.acked_by(n) for n in range(46, 51)))

        assert late.client.loads == [f"trl-policy-v{n}" for n in (50, 49, 48, 47, 46)]
    assert [e.version for e in site.events("version_fetched")] == [50, 49, 48, 47, 46]


async def test_what_is_published_during_a_slow_copy_is_skipped_but_the_newest(
    site: Site, slow: SlowStorage, double: SimulatedServer
) -> None:
    fast, site.storage = site.storage, slow
    async with site.sidecar(double) as running:
        site.storage = fast  # for the publisher
        await site.publish(1)
        await asyncio.to_thread(slow.begun.wait)
        await site.publish(*range(2, 11))
        slow.may_end.set()
        await site.until(lambda v: v.current == 10)

        assert running.client.loads == ["trl-policy-v1", "trl-policy-v10"]
    states = {v.version: v.state for v in site.ledger.versions(line=LINE)}
    assert {states[n] for n in range(2, 10)} == {"skipped"}


async def test_a_slow_disk_blocks_the_others_for_the_grace_at_most(
    site: Site, slow: SlowStorage, double: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I9; and once its disk answers, the slow one serves current before it serves the past."""
    monkeypatch.setattr(plan, "_FRESH_S", 0.0)  # as if the copy took longer than that
    site.run = replace(RunSettings(), ready_grace_s=0.1)
    fast, site.storage = site.storage, slow
    async with site.sidecar(double) as behind, SimulatedServer() as other:
        site.storage = fast
        async with site.sidecar(other, "r1"):
            await site.publish_and_wait(1, 2, 3)
            assert site.ledger.view(LINE).acked_by(3) == ("r1",)

            slow.may_end.set()
            await site.until(lambda v: all("r0" in v.acked_by(n) for n in (1, 2, 3)))

    first, *rest = behind.client.loads
    assert first == "trl-policy-v3"
    assert sorted(rest) == ["trl-policy-v1", "trl-policy-v2"]
