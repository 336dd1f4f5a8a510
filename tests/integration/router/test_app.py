"""Start and stop of a router: the address, the spool, the drain."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from policyline.errors import ListenFailed
from policyline.router.errors import SpoolUnusable
from tests.integration.router.site import ENDLESS, LONG, Client, Site, stream


async def test_a_stop_finishes_open_requests_and_accepts_no_new_ones(site: Site) -> None:
    await site.add("r0", options=LONG)
    version = await site.publish_and_serve(1)
    engine = site.doubles["r0"].service.engine

    async with aiohttp.ClientSession() as http:
        async with site.router() as inner:
            client = Client(inner.url, http)  # outlives the router
            task = asyncio.create_task(client.complete(version, max_tokens=20, ignore_eos=True))
            await site.until(lambda: len(engine.running) == 1)
            port = int(client.url.rpartition(":")[2])
            refused = asyncio.create_task(_until_refused(port))
        reply = await task
        await refused

    assert reply.status == 200
    assert len(site.rollouts()) == 1, "recorded before the end"


async def test_requests_that_a_stop_cancels_get_an_error(site: Site) -> None:
    await site.add("r0", options=ENDLESS)
    version = await site.publish_and_serve(1)
    waits_for = await site.publish(2)
    engine = site.doubles["r0"].service.engine
    endless = {"model": f"trl-policy-v{version}", "max_tokens": 200}

    async with aiohttp.ClientSession() as http:
        async with site.router(drain_timeout_s=0.1) as inner:
            client = Client(inner.url, http)  # outlives the router
            asked = asyncio.create_task(client.complete(version, max_tokens=200, ignore_eos=True))
            waits = asyncio.create_task(client.complete(waits_for))
            streaming = await (await stream(client, endless))
            await streaming.content.readany()
            await site.until(lambda: len(engine.running) == 2)
        with pytest.raises(aiohttp.ClientError):
            await streaming.read()
        for reply in (await asked, await waits):
            assert (reply.status, reply.error) == (503, "draining")
            assert "retry-after" in reply.headers

    assert [row.status for row in site.rollouts()] == [502, 502]


async def _until_refused(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        writer.close()
        await asyncio.sleep(0.01)


async def test_an_address_in_use(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with site.running() as (router, _):
            with pytest.raises(ListenFailed, match=r"127\.0\.0\.1"):
                await router.listen("127.0.0.1", taken.getsockname()[1])


async def test_a_spool_belongs_to_one_router(site: Site) -> None:
    async with site.router("one"):
        with pytest.raises(SpoolUnusable, match="another router"):
            async with site.router("one"):
                pass
