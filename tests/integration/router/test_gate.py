"""Right version, right replica, over HTTP, against doubles of vLLM."""

from __future__ import annotations

import asyncio
import time

import pytest

from policyline.engines.simulated.faults import ALWAYS, Fault
from tests.integration.router.site import LONG, PROMPT, Site


async def test_a_completion_comes_from_the_version_that_is_named(site: Site) -> None:
    await site.add("r0", "r1")
    first = await site.publish_and_serve(1)
    second = await site.publish_and_serve(2)

    async with site.router() as client:
        replies = {v: await client.complete(v, logprobs=0) for v in (first, second)}

        for version, reply in replies.items():
            assert reply.status == 200, reply.body
            row = site.ledger.version("trl-policy", version)
            assert reply.headers["x-policy-version"] == str(version)
            assert reply.headers["x-policy-digest"] == row.digest
            assert reply.replica in {"r0", "r1"}
            assert reply.content["model"] == f"trl-policy-v{version}"
        scores = [r.content["choices"][0]["logprobs"]["token_logprobs"] for r in replies.values()]
        assert scores[0] != scores[1]


async def test_only_acked_replicas_are_asked(site: Site) -> None:
    await site.add("r0", "r1", "r2")
    version = await site.publish(1)
    await site.serve(version, "r1")

    async with site.router() as client:
        replies = await asyncio.gather(*(client.complete(version) for _ in range(12)))

    assert {r.replica for r in replies} == {"r1"}


@pytest.mark.parametrize("content", [{}, {"model": ""}, {"model": None}])
async def test_no_model_is_no_base_model(site: Site, content: dict[str, object]) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)

    async with site.router() as client:
        reply = await client.post("/v1/completions", {"prompt": PROMPT, **content})

    assert (reply.status, reply.error) == (400, "model_missing")
    assert site.doubles["r0"].requests["/v1/completions"] == 0


async def test_names_that_are_not_served(site: Site) -> None:
    await site.add("r0")
    versions = [await site.publish_and_serve(seed) for seed in range(1, 6)]
    bad = await site.publish(9)
    site.ledger.withdraw("trl-policy", bad, "it was bad")

    async with site.router() as client:
        base = await client.complete("tiny")
        never = await client.complete(99)
        evicted = await client.complete(versions[0])
        withdrawn = await client.complete(bad)

    assert (base.status, base.error) == (404, "policy_unknown")
    assert (never.status, never.error) == (404, "policy_unknown")
    assert (evicted.status, evicted.error) == (410, "policy_evicted")
    assert (withdrawn.status, withdrawn.error) == (410, "policy_withdrawn")
    assert "it was bad" in withdrawn.content["error"]["message"]
    assert site.doubles["r0"].requests["/v1/completions"] == 0


async def test_published_but_not_acked_waits_until_it_is(site: Site) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)
    version = await site.publish(2)

    async with site.router() as client:
        waiting = asyncio.create_task(client.complete(version))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await site.serve(version)
        reply = await waiting

    assert (reply.status, reply.headers["x-policy-version"]) == (200, str(version))


async def test_a_wait_ends_with_when_to_try_again(site: Site) -> None:
    await site.add("r0")
    version = await site.publish(1)

    async with site.router(ready_wait_s=0.2) as client:
        begun = time.monotonic()
        reply = await client.complete(version)

    assert (reply.status, reply.error) == (503, "policy_not_ready")
    assert int(reply.headers["retry-after"]) >= 1
    assert time.monotonic() - begun >= 0.2


async def test_a_version_published_a_moment_ago_is_looked_up(site: Site) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)
    async with site.router(poll_interval_s=3600.0) as client:
        version = await site.publish_and_serve(2)

        assert (await client.complete(version)).status == 200


async def test_the_last_view_is_used_while_the_ledger_is_unreachable(site: Site) -> None:
    await site.add("r0")
    versions = [await site.publish_and_serve(seed) for seed in range(1, 6)]
    async with site.running(poll_interval_s=0.05) as (router, client):
        site.ledger.unreachable = True
        await site.until(lambda: not router.view_cache.ledger_up)

        served = await client.complete(versions[-1])
        unknown = await client.complete(versions[0])
        status = (await client.get("/status")).content

        site.ledger.unreachable = False
        await site.until(lambda: router.view_cache.ledger_up)
        assert (await client.complete(versions[0])).status == 410
        assert len(await site.until_recorded(1)) == 1

    assert served.status == 200
    assert (unknown.status, unknown.error) == (503, "ledger_unreachable")
    assert not status["ledger"]["up"]


async def test_an_engine_that_lost_an_acked_version_is_passed_over(site: Site) -> None:
    await site.add("r0", "r1")
    version = await site.publish_and_serve(1)
    await site.doubles["r0"].service.unload(f"trl-policy-v{version}")

    async with site.router() as client:
        replies = [await client.complete(version) for _ in range(6)]
        asked = site.doubles["r0"].requests["/v1/completions"]
        await site.serve(version, "r0")
        await site.until(lambda: _serving(site, version))
        again = await asyncio.gather(*(client.complete(version, seed=n) for n in range(60)))

    assert {(r.status, r.replica) for r in replies} == {(200, "r1")}
    assert asked == 1
    assert "r0" in {r.replica for r in again}


def _serving(site: Site, version: int) -> bool:
    return len(site.ledger.view("trl-policy").acked_by(version)) == 2


async def test_a_restarted_replica_is_asked_only_after_a_new_ack(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.router(ready_wait_s=0.3) as client:
        assert (await client.complete(version)).status == 200
        await site.restart("r0")
        assert (await client.complete(version)).error == "policy_not_ready"
        await site.serve(version)
        assert (await client.complete(version)).status == 200


async def test_slots_bound_the_versions_in_flight(site: Site) -> None:
    await site.add("r0", slots=2, options=LONG)
    versions = [await site.publish_and_serve(seed) for seed in (1, 2, 3)]

    async with site.running() as (router, client):
        tasks = [
            asyncio.create_task(client.complete(v, max_tokens=20, ignore_eos=True))
            for v in versions
        ]
        most = 0
        while not all(t.done() for t in tasks):
            loads = router.affinity._loads.values()
            most = max([most, *(len(load) for load in loads)])
            await asyncio.sleep(0.005)

    assert {(await t).status for t in tasks} == {200}
    assert most == 2


async def test_a_group_goes_to_the_replica_that_has_its_prefix(site: Site) -> None:
    await site.add("r0", "r1", options=LONG)
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        groups = [
            await asyncio.gather(
                *(client.complete(version, prompt=[10 + g] * 40, seed=n) for n in range(8))
            )
            for g in range(6)
        ]

    assert all(len({r.replica for r in group}) == 1 for group in groups)
    assert len({group[0].replica for group in groups}) == 2
    hits = sum(d.service.engine.prefix_hits for d in site.doubles.values())
    asked = sum(d.service.engine.prefix_queries for d in site.doubles.values())
    assert hits / asked > 0.5


async def test_an_unready_router_says_so(site: Site) -> None:
    await site.add("r0", "r1")
    async with site.router(min_ready=2) as client:
        empty = await client.get("/health")
        version = await site.publish(1)
        await site.serve(version, "r0", "r1")
        await site.until(lambda: site.ledger.view("trl-policy").current == version)
        ready = await client.until_health(200)
        await site.restart("r1")
        half = await client.until_health(503)

    assert empty.status == 503
    assert ready.content["serving"] == ["r0", "r1"]
    assert half.content["degraded"]
    assert "current is not served by r1" in half.content["problems"]


async def test_an_engine_error_for_the_client_is_passed_on(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        reply = await client.complete(version, prompt=[99999])

    assert reply.status == 400
    assert "out of vocabulary" in reply.content["error"]["message"]
    assert reply.headers["x-policy-version"] == str(version)


async def test_a_replica_that_fails_is_passed_over(site: Site) -> None:
    await site.add("r0", "r1")
    version = await site.publish_and_serve(1)
    site.doubles["r0"].script(Fault("completions", "fail", ALWAYS, status=500))

    async with site.router() as client:
        replies = await asyncio.gather(*(client.complete(version, seed=n) for n in range(20)))

    assert {(r.status, r.replica) for r in replies} == {(200, "r1")}
