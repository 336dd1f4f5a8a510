"""The local cache next to a working engine: what goes, what stays, what is repaired."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import RunSettings
from policyline.ledger.manifest import FileEntry
from policyline.storage import DirectoryStorage
from policyline.watcher.cache import Cache
from tests.engines import until
from tests.integration.watcher.site import Site, names


class FullDisk(DirectoryStorage):
    """The disk that copies go to is full the given number of times."""

    times = 0

    def fetch(self, name: str, entries: Sequence[FileEntry], into: Path) -> None:
        """Fail as a write to a full disk does."""
        if self.times:
            self.times -= 1
            raise OSError(errno.ENOSPC, "No space left on device", str(into / "adapter"))
        super().fetch(name, entries, into)


async def test_a_full_disk_is_reported_with_its_path_and_leaves_the_window_served(
    site: Site, double: SimulatedServer
) -> None:
    site.storage = FullDisk(site.storage.root)
    async with site.sidecar(double) as running:
        await site.publish_and_wait(1)
        site.storage.times = 4
        await site.publish(2)

        await running.until_status("No space left on device")
        (failed,) = await site.until_event("version_load_failed")
        assert str(site.root / "cache" / "r0") in failed.data["reason"]
        assert site.ledger.view("trl-policy").acked_by(1) == ("r0",)
        await site.until_acked(2)


async def test_a_damaged_copy_of_a_served_version_is_found_at_the_start_and_repaired(
    site: Site, double: SimulatedServer
) -> None:
    """vLLM may read it again at any time, and would serve what it finds."""
    async with site.sidecar(double) as first:
        await site.publish_and_wait(1)
        await first.kill()
    config = Path(double.service.registry["trl-policy-v1"].path) / "adapter_config.json"
    right = config.read_text()
    config.write_text("{}")

    async with site.sidecar(double) as second:

        async def is_repaired() -> bool:
            return config.read_text() == right

        await until(is_repaired)
        assert second.client.loads == []
        assert len(site.events("version_acked")) == 1


async def test_orphans_go_and_what_the_engine_lists_stays(
    site: Site, double: SimulatedServer
) -> None:
    former = Cache(site.root / "cache" / "r0", "a-former-ledger")
    former.open()
    former.close()
    copy = Path(former.home) / "trl-policy-v1-0123456789abcdef"
    copy.mkdir()
    async with site.sidecar(double) as first:
        await site.publish_and_wait(1)
        await until(partial(_gone, copy))
        orphan = Path(double.service.registry["trl-policy-v1"].path).parent / "trl-policy-v9-00"
        shutil.copytree(site.root / "adapters" / "1", site.root / "orphan")
        (site.root / "orphan").rename(orphan)

        await until(partial(_gone, orphan))
        await first.until_status('"ready":true')
        assert site.copies() == names(1)


async def test_a_limit_makes_room_and_keeps_the_window(site: Site, double: SimulatedServer) -> None:
    site.run = RunSettings(max_staleness=0)
    async with site.sidecar(double) as first:
        await site.publish_and_wait(1)
        await first.stop()
    size = sum(f.stat().st_size for f in _files(site.root / "cache" / "r0"))

    async with site.sidecar(double, grace_s=1000.0, cache_limit_bytes=2 * size) as running:
        await site.publish_and_wait(2, 3, 4)

        assert site.copies() <= names(3, 4)
        site.ledger.pin("trl-policy", 3, serve=True)
        await site.until_acked(3)
        await site.publish(5)
        await running.until_status("--cache-limit")
        assert site.copies() == names(3, 4)
        assert site.ledger.view("trl-policy").acked_by(4) == ("r0",)

        site.ledger.unpin("trl-policy", 3)
        await site.until_acked(5)


async def _gone(path: Path) -> bool:
    return not await asyncio.to_thread(path.exists)


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
