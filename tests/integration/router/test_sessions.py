"""The alias: current, kept for a session; and several routers side by side."""

from __future__ import annotations

import asyncio

from policyline.router.sessions import MAX_SESSIONS, Sessions
from tests.integration.router.site import Site


async def test_an_episode_keeps_the_version_it_began_with(site: Site) -> None:
    await site.add("r0")
    first = await site.publish_and_serve(1)

    async with site.running() as (router, client):
        begun = await client.complete("trl-policy", user="episode-1")
        second = await site.publish_and_serve(2)
        await site.until(lambda: router.view_cache.gate.current == second)

        goes_on = await client.complete("trl-policy", user="episode-1")
        by_header = await client.complete(
            "trl-policy", headers={"x_policyline_session": "episode-1"}
        )
        new = await client.complete("trl-policy", user="episode-2")
        without = await client.complete("trl-policy")
        rows = await site.until_recorded(5)

    versions = [
        int(r.headers["x-policy-version"]) for r in (begun, goes_on, by_header, new, without)
    ]
    assert versions == [first, first, first, second, second]
    assert new.content["model"] == f"trl-policy-v{second}"
    assert {r.asked_name for r in rows} == {"trl-policy"}
    assert sorted(r.version for r in rows) == [first, first, first, second, second]


async def test_an_episode_that_outlives_the_window_is_told_so(site: Site) -> None:
    await site.add("r0")
    first = await site.publish_and_serve(1, max_staleness=0)

    async with site.running() as (router, client):
        await client.complete("trl-policy", user="episode")
        second = await site.publish_and_serve(2)
        await site.until(lambda: router.view_cache.gate.current == second)
        late = await client.complete("trl-policy", user="episode")

    assert first != second
    assert (late.status, late.error) == (410, "policy_evicted")


async def test_a_pin_expires(site: Site) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)

    async with site.running(pin_ttl_s=0.05) as (router, client):
        await client.complete("trl-policy", user="episode")
        second = await site.publish_and_serve(2)
        await site.until(lambda: router.view_cache.gate.current == second)
        await asyncio.sleep(0.06)
        later = await client.complete("trl-policy", user="episode")

    assert later.headers["x-policy-version"] == str(second)


async def test_the_alias_waits_for_the_first_version(site: Site) -> None:
    await site.add("r0")

    async with site.router() as client:
        waiting = asyncio.create_task(client.complete("trl-policy"))
        version = await site.publish_and_serve(1)
        reply = await waiting
    async with site.router(alias="latest") as client:
        other = await client.complete("latest")
        plain = await client.complete("trl-policy")

    assert (reply.status, reply.headers["x-policy-version"]) == (200, str(version))
    assert other.status == 200
    assert (plain.status, plain.error) == (404, "policy_unknown")


async def test_several_routers_give_the_same_answers(site: Site) -> None:
    await site.add("r0", "r1")
    versions = [await site.publish_and_serve(seed) for seed in range(1, 6)]

    async with site.router("one") as one, site.router("two") as two:
        names: list[int | str] = [*versions, 99, "trl-policy", "tiny"]
        for asked in names:
            pair = [await c.complete(asked, logprobs=0) for c in (one, two)]
            assert len({r.status for r in pair}) == 1
            if pair[0].status == 200:
                assert len({r.headers["x-policy-digest"] for r in pair}) == 1
                assert len({str(r.content["choices"]) for r in pair}) == 1
            else:
                assert len({r.body for r in pair}) == 1
        rows = await site.until_recorded(8)

    assert len({r.request for r in rows}) == len(rows) == 8


def test_pins_go_in_the_order_of_their_last_use() -> None:
    sessions = Sessions(ttl_s=10.0)

    assert sessions.version("a", 1, now=0.0) == 1
    assert sessions.version("b", 1, now=1.0) == 1
    assert sessions.version("a", 2, now=9.0) == 1, "used again"
    assert sessions.version("c", 2, now=12.0) == 2
    assert len(sessions) == 2, "b is gone"
    assert sessions.version("b", 3, now=12.0) == 3
    assert sessions.version("a", 3, now=19.0) == 1


def test_pins_are_bounded() -> None:
    sessions = Sessions(ttl_s=1e9)

    for number in range(MAX_SESSIONS + 10):
        sessions.version(str(number), 1, now=float(number))

    assert len(sessions) <= MAX_SESSIONS + 1
