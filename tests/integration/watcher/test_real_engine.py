"""The sidecar next to a real vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from policyline.demo.synthetic import write_adapter
from policyline.engines.vllm import VllmServer
from policyline.ledger import RunSettings
from policyline.publisher import Publisher
from policyline.watcher import Sidecar, SidecarSettings
from policyline.watcher.vllm.client import EngineClient
from tests.engines import until
from tests.integration.watcher.site import Site

pytestmark = pytest.mark.engine

LINE = "sidecar-test"
"""A line of its own: the server is shared with other tests."""


async def test_versions_are_served_differ_and_leave(site: Site, vllm_server: VllmServer) -> None:
    run = RunSettings(max_staleness=2)
    settings = SidecarSettings(
        replica="r0",
        cache=site.root / "cache",
        line=LINE,
        listen="127.0.0.1:0",
        poll_interval_s=1.0,
        linger_s=0.0,
        grace_s=0.5,
    )

    def publish(seed: int) -> None:
        adapter = write_adapter(site.root / str(seed), seed)
        with Publisher(site.ledger, site.storage, run="real", line=LINE, settings=run) as publisher:
            publisher.publish(adapter)

    async with EngineClient(vllm_server.url) as client, asyncio.timeout(240):
        ids = await client.resident_ids()
        sidecar = Sidecar(settings, site.ledger, site.storage, client)
        task = asyncio.create_task(sidecar.run())
        for seed in range(1, 6):
            await asyncio.to_thread(publish, seed)
            while site.ledger.view(LINE).acked_by(seed) != ("r0",):  # noqa: ASYNC110 - real time
                await asyncio.sleep(0.05)
        home = site.root / "cache" / site.ledger.ledger_id
        while len(list(home.glob(f"{LINE}-*"))) > 3:  # noqa: ASYNC110 - real time
            await asyncio.sleep(0.05)

        async def evicted_left_the_workers() -> bool:
            return len(await client.resident_ids() - ids) <= 3

        await until(evicted_left_the_workers, 60)
        await asyncio.to_thread(site.ledger.pause, LINE, "test")
        await until(client.is_paused, 60)
        await asyncio.to_thread(site.ledger.resume, LINE)

        async def runs() -> bool:
            return not await client.is_paused()

        await until(runs, 60)
        served = {a.name for a in (await client.models()).adapters if a.name.startswith(LINE)}
        sidecar.stop()
        await task
        for name in served:
            await client.unload(name)

    rows = {r.version: r for r in site.ledger.residency(LINE)}
    assert served == {f"{LINE}-v{n}" for n in (3, 4, 5)}
    assert {n: rows[n].state for n in (1, 2)} == {1: "evicted", 2: "evicted"}
    probes = [json.loads(row.probe) for row in rows.values()]
    for one, other in itertools.combinations(probes, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1
