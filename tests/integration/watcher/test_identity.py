"""A vLLM that still holds the names of a former run, with another ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.storage import DirectoryStorage
from tests.engines import LONG, PROMPT, until
from tests.integration.watcher.site import CountingClient, Site


@pytest.fixture
def next_site(tmp_path: Path) -> Iterator[Site]:
    """A new ledger and storage, with the former cache directory."""
    root = tmp_path / "next"
    (root / "storage").mkdir(parents=True)
    (root / "cache").symlink_to(tmp_path / "cache")
    upgrade_url(str(root / "ledger.db"))
    with Ledger(str(root / "ledger.db")) as ledger:
        yield Site(root, ledger, DirectoryStorage(root / "storage"))


async def former_run(site: Site, engine: SimulatedServer) -> None:
    async with site.sidecar(engine) as running:
        await site.publish_and_wait(1, 2)
        await running.stop()


async def test_without_take_over_it_says_exactly_what_to_do(
    site: Site, next_site: Site, double: SimulatedServer
) -> None:
    await former_run(site, double)
    async with next_site.sidecar(double) as running:
        await next_site.publish(3)

        await running.until_status('"reason":"blocked"')
        status = (await running.get("/status")).json()
        metrics = (await running.get("/metrics")).text
        await running.stop()
        (pending,) = status["pending"]
        assert pending["name"] == "trl-policy-v1"
        assert "another path than this watcher's copy" in pending["why"]
        assert "restart vLLM, or start this sidecar with --take-over" in pending["why"]
        assert 'policyline_pending_versions{reason="blocked"} 1.0' in metrics
        assert running.client.unloads == []
        assert site.copies() == {"trl-policy-v1", "trl-policy-v2"}


async def test_with_take_over_the_new_run_is_served_once_requests_have_ended(
    site: Site, next_site: Site
) -> None:
    only_engine = EngineOptions(max_model_len=512)
    options = ServiceOptions(engine=only_engine, step_delay_s=0.005)
    async with SimulatedServer(options) as engine, CountingClient(engine.url) as client:
        await former_run(site, engine)
        asked = client.complete("trl-policy-v1", PROMPT, **LONG | {"max_tokens": 300})
        long = asyncio.create_task(asked)

        async def is_busy() -> bool:
            return "trl-policy-v1" in ((await client.snapshot()).busy or set())

        await until(is_busy)
        async with next_site.sidecar(engine, take_over=True) as running:
            await next_site.publish(3)
            await running.until_status("removed once no request is on it")
            assert not long.done()
            assert len((await long).token_ids) == 300

            view = await next_site.until_acked(1)
            assert view.current == 1
            assert running.client.resets >= 1
            place = view.desired[0].digest[:16]
            assert engine.service.registry["trl-policy-v1"].path.endswith(place)
            assert "trl-policy-v2" not in engine.service.registry
