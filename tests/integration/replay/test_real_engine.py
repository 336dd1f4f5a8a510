"""A run that a sidecar served on a real vLLM, served there again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from policyline.demo.synthetic import write_adapter
from policyline.engines.vllm import VllmServer
from policyline.ledger import RunSettings
from policyline.publisher import Publisher
from policyline.replay_into.model import Replayed
from policyline.replay_into.run import Replay
from policyline.replay_into.settings import ReplaySettings
from policyline.replay_into.state import StateFile
from policyline.watcher import Sidecar, SidecarSettings
from policyline.watcher.cache import Cache
from policyline.watcher.vllm.client import EngineClient
from tests.integration.watcher.conftest import site
from tests.integration.watcher.site import Site

__all__ = ["site"]
pytestmark = pytest.mark.engine

LINE = "replay-test"
"""A line of its own: the server is shared with other tests."""
COUNT = 3


async def test_the_real_server_gives_the_same_answers_again(
    site: Site, vllm_server: VllmServer
) -> None:
    async with EngineClient(vllm_server.url) as client, asyncio.timeout(240):
        await serve_once(site, client)
        resident = await client.resident_ids()

        results = await replayed(site, client)

        assert [r.outcome for r in results] == ["agrees"] * COUNT
        assert [r.difference for r in results] == [0.0] * COUNT
        assert [a for a in (await client.models()).adapters if a.name.startswith(LINE)] == []
        assert await client.resident_ids() <= resident
        home = site.root / "replay" / site.ledger.ledger_id
        assert [p.name for p in home.iterdir() if not p.name.startswith(".")] == []


async def serve_once(site: Site, client: EngineClient) -> None:
    """Publish, have a sidecar ack each, and unload everything again."""
    settings = SidecarSettings(
        replica="r0",
        cache=site.root / "cache",
        line=LINE,
        listen="127.0.0.1:0",
        poll_interval_s=1.0,
    )
    sidecar = Sidecar(settings, site.ledger, site.storage, client)
    task = asyncio.create_task(sidecar.run())
    for seed in range(1, COUNT + 1):
        await asyncio.to_thread(publish, site, seed)
        while site.ledger.view(LINE).acked_by(seed) != ("r0",):  # noqa: ASYNC110 - real time
            await asyncio.sleep(0.05)
    sidecar.stop()
    await task
    for adapter in (await client.models()).adapters:
        if adapter.name.startswith(LINE):
            await client.unload(adapter.name)


def publish(site: Site, seed: int) -> None:
    adapter = write_adapter(site.root / str(seed), seed)
    rules = replace(RunSettings(), max_staleness=COUNT)
    with Publisher(site.ledger, site.storage, run="real", line=LINE, settings=rules) as publisher:
        publisher.publish(adapter)


async def replayed(site: Site, client: EngineClient) -> list[Replayed]:
    cache = Cache(site.root / "replay", site.ledger.ledger_id)
    cache.open()
    try:
        return await Replay(
            ReplaySettings("real"),
            ledger=site.ledger,
            storage=site.storage,
            engine=client,
            cache=cache,
            state=StateFile(None),
            on_result=lambda _result, _number, _total: None,
            on_message=lambda _text: None,
        ).run()
    finally:
        cache.close()
