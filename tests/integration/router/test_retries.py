"""Requests that a replica fails: retried on another one, where that is safe."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import EngineFacts
from policyline.router import Router
from policyline.router.gate import Endpoint, Serve
from tests.integration.router.site import LONG, Site

KEYED = ServiceOptions(EngineOptions(), api_key="engine-key")


async def test_a_replica_that_dies_before_the_first_byte_is_replaced(site: Site) -> None:
    await site.add("r0", "r1", options=LONG)
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        tasks = [
            asyncio.create_task(client.complete(version, max_tokens=20, prompt=[n] * 30))
            for n in range(5, 13)
        ]
        await site.until(lambda: all(d.service.engine.running for d in site.doubles.values()))
        await site.doubles["r0"].kill()
        replies = await asyncio.gather(*tasks)
        rows = await site.until_recorded(8)

    assert {r.status for r in replies} == {200}
    assert {r.replica for r in replies} == {"r1"}
    assert {row.replica for row in rows} == {"r1"}
    assert len({row.request for row in rows}) == 8


async def test_no_replica_answers(site: Site) -> None:
    await site.add("r0", "r1")
    version = await site.publish_and_serve(1)
    for double in site.doubles.values():
        await double.kill()

    async with site.router(ready_wait_s=0.5) as client:
        reply = await client.complete(version)

    assert (reply.status, reply.error) == (503, "policy_not_ready")
    assert "retry-after" in reply.headers


async def test_a_request_that_every_engine_fails_does_not_reach_all_of_them(site: Site) -> None:
    await site.add("r0", "r1", "r2", "r3")
    version = await site.publish_and_serve(1)
    for double in site.doubles.values():
        double.script(Fault("completions", "fail", ALWAYS))

    async with site.router() as client:
        reply = await client.complete(version)

    assert (reply.status, reply.error) == (502, "replica_failed")
    assert sum(d.requests["/v1/completions"] for d in site.doubles.values()) == 3
    assert re.search(r"replica r\d failed: it answers 500", reply.content["error"]["message"])


async def test_a_replica_that_never_answers_is_given_up(site: Site) -> None:
    await site.add("r0", "r1")
    version = await site.publish_and_serve(1)
    site.doubles["r0"].script(Fault("completions", "hang", ALWAYS))

    async with site.router(read_timeout_s=0.3) as client:
        replies = await asyncio.gather(*(client.complete(version, seed=n) for n in range(6)))

    assert {(r.status, r.replica) for r in replies} == {(200, "r1")}


async def test_a_replica_that_refuses_the_routers_key_is_a_502(site: Site) -> None:
    await site.add("r0", options=KEYED)
    version = await site.publish_and_serve(1)

    async with site.router(upstream_key="wrong") as client:
        reply = await client.complete(version)

    assert (reply.status, reply.error) == (502, "replica_refuses_router")
    assert "replica r0 answers 401" in reply.content["error"]["message"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["evicted", "left", "restarted"])
async def test_a_request_at_a_hung_replica_is_retried_when_the_ack_is_lost(
    site: Site, how: str, streams: bool
) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    site.doubles["r0"].script(Fault("completions", "hang", ALWAYS))

    async with site.running() as (router, client):
        task = asyncio.create_task(client.complete(version, stream=streams))
        await site.until(lambda: router.affinity.in_flight()["r0"] == 1)
        await site.add("r1")
        await site.serve(version, "r1")
        await site.until(lambda: len(served_by(router, version)) == 2)
        assert not task.done()
        if how == "evicted":
            await evict(site, "r0", version)
        elif how == "left":
            await asyncio.to_thread(site.ledger.leave, site.members["r0"], "gone")
        else:
            facts = EngineFacts("2", "b", 6)
            await asyncio.to_thread(site.ledger.change_incarnation, site.members["r0"], facts)
        reply = await asyncio.wait_for(task, 30)
        metrics = await client.get("/metrics")
        rows = await site.until_recorded(1)
        assert router.affinity.in_flight().total() == 0

    assert (reply.status, reply.replica) == (200, "r1")
    assert b'policyline_router_retries_total{why="ack_lost"} 1.0' in metrics.body
    assert [(row.replica, row.status) for row in rows] == [("r1", 200)]


@pytest.mark.parametrize("how", ["ack_lost", "withdrawn"])
async def test_a_request_stays_when_no_other_replica_can_serve_it(site: Site, how: str) -> None:
    """No other replica serves the version, or it was withdrawn: the answer in flight is right."""
    await site.add("r0", options=LONG)
    version = await site.publish_and_serve(1)
    await site.publish_and_serve(2)

    async with site.running() as (router, client):
        task = asyncio.create_task(client.complete(version, max_tokens=100, ignore_eos=True))
        await site.until(lambda: router.affinity.in_flight()["r0"] == 1)
        if how == "ack_lost":
            await evict(site, "r0", version)
        else:
            await asyncio.to_thread(site.ledger.withdraw, "trl-policy", version, "it was bad")
        await site.until(lambda: not served_by(router, version))
        assert not task.done()
        reply = await task

    assert (reply.status, reply.replica) == (200, "r0")


def served_by(router: Router, version: int) -> Sequence[Endpoint]:
    verdict = router.view_cache.gate.judge_version(version)
    return verdict.endpoints if isinstance(verdict, Serve) else ()


async def evict(site: Site, replica: str, version: int) -> None:
    """Record an eviction, as a watcher does."""
    digest = site.ledger.version("trl-policy", version).digest or ""
    await asyncio.to_thread(
        site.ledger.evicted, site.members[replica], version, digest=digest, reason="drift"
    )
