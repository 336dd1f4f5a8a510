"""No wall clock decides anything: a host's clock is set while its sidecar works."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.db.migrate import upgrade_url
from policyline.storage import DirectoryStorage
from tests.engines import until
from tests.integration.watcher.site import Site, names

STEPS_H = (0.0, 5.0, -5.0, 26.0, -30.0, 0.5)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site whose wall clock is hours before or after the last time at every look at it."""
    (tmp_path / "storage").mkdir()
    url = str(tmp_path / "ledger.db")
    upgrade_url(url)
    steps = itertools.cycle(timedelta(hours=hours) for hours in STEPS_H)
    rules = RunSettings(max_staleness=2, ready_grace_s=60.0)
    with Ledger(url, clock=lambda: datetime.now(UTC) + next(steps)) as ledger:
        yield Site(tmp_path, ledger, DirectoryStorage(tmp_path / "storage"), rules)


async def _until_it_has(engine: SimulatedServer, wanted: set[str]) -> None:
    async def has() -> bool:
        return set(engine.service.registry) == wanted

    await until(has)


async def test_a_stepped_clock_changes_nothing(site: Site, double: SimulatedServer) -> None:
    async with (
        SimulatedServer() as other,
        site.sidecar(double, heartbeat_s=0.2, ttl_s=5.0) as first,
        site.sidecar(other, "r1", heartbeat_s=0.2, ttl_s=5.0) as second,
    ):
        await site.publish_and_wait(1, 2, 3, 4, 5)
        view = await site.until_acked(5, "r0", "r1")
        await site.until_event("version_evicted", 4)

        assert [d.version for d in view.desired] == [5, 4, 3]
        for engine in (double, other):  # which is recorded a moment before it is done
            await _until_it_has(engine, names(3, 4, 5))
        for running in (first, second):
            assert running.client.loads == [f"trl-policy-v{n}" for n in range(1, 6)]
        acked = sorted((e.version, e.replica) for e in site.events("version_acked"))
        assert acked == [(n, r) for n in range(1, 6) for r in ("r0", "r1")]
        evicted = sorted((e.version, e.replica) for e in site.events("version_evicted"))
        assert evicted == [(n, r) for n in (1, 2) for r in ("r0", "r1")]
        # one that steps back lets time stand still in the ledger, and nothing more
        recorded = [e.recorded_at for e in site.ledger.events()]
        assert recorded == sorted(recorded)
        assert len(set(recorded)) > 1
        # beats move by a counter, whatever the clock shows
        assert site.events("replica_lost") == []


async def test_a_silent_replica_is_lost_whatever_the_clock_shows(
    site: Site, double: SimulatedServer
) -> None:
    """The other half: the time that it was silent is not the wall clock's."""
    async with (
        SimulatedServer() as other,
        site.sidecar(double, heartbeat_s=0.2, ttl_s=1.0),
        site.sidecar(other, "r1", heartbeat_s=0.2, ttl_s=1.0) as silent,
    ):
        await silent.kill()
        (lost,) = await site.until_event("replica_lost")

        assert lost.replica == "r1"
        await site.publish_and_wait(1)
        assert site.reported(1) == "acked"
