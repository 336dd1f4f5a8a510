"""One row for each answer: none lost, none doubled, whatever happens to router and ledger."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import Counter

import aiohttp
import pytest

from policyline.engines.child import ChildServer
from policyline.ledger.names import policy_name
from policyline.ledger.read.audit import find_rollout
from tests.integration.router.site import LONG, Client, Site


async def test_a_row_for_each_answer(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        reply = await client.complete(version, headers={"x_policyline_session": "episode-7"})
        await client.complete(99)
        (row,) = await site.until_recorded(1)

    assert row.request == reply.headers["x-request-id"]
    assert (row.run, row.version, row.replica, row.status) == ("run", version, "r0", 200)
    assert (row.asked_name, row.episode) == (f"trl-policy-v{version}", "episode-7")
    assert (row.prompt_tokens, row.completion_tokens) == (40, 3)
    assert row.staleness == 0
    assert row.started_at > "2026"
    assert row.queue_s >= 0
    assert row.prefill_s > 0


async def test_a_client_finds_its_rollout_by_the_answers_own_id(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}

    async with site.router() as client:
        replies = [
            await client.complete(version),
            await client.post(
                "/v1/chat/completions", {"model": policy_name("trl-policy", 1), **chat}
            ),
        ]
        await site.until_recorded(2)

    for reply in replies:
        for suffix in ("", "-0", "-0-12ab34cd", "-12ab34cd"):
            row = find_rollout(site.ledger, reply.content["id"] + suffix)
            assert row is not None
            assert row.request == reply.headers["x-request-id"]
    assert find_rollout(site.ledger, "cmpl-unknown") is None


async def test_an_unreachable_ledger_gets_its_rows_later(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.running() as (router, client):
        site.ledger.unreachable = True
        replies = await asyncio.gather(*(client.complete(version, seed=n) for n in range(20)))
        await site.until(lambda: router.uploader.waiting > 0)
        assert not site.rollouts()
        site.ledger.unreachable = False
        rows = await site.until_recorded(20)

    assert {r.request for r in rows} == {r.headers["x-request-id"] for r in replies}
    assert len(rows) == 20


async def test_a_reply_that_is_lost_doubles_nothing(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    site.ledger.reply_lost = 3

    async with site.router() as client:
        for seed in range(5):
            await client.complete(version, seed=seed)
            await site.until_recorded(seed + 1)

    assert len(site.rollouts()) == 5
    assert not list((site.root / "router").glob("*.jsonl"))


async def test_a_router_that_stops_while_the_ledger_is_unreachable_leaves_its_rows_for_the_next(
    site: Site,
) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    async with site.router() as client:
        site.ledger.unreachable = True
        await client.complete(version)
    assert not site.rollouts()
    site.ledger.unreachable = False

    async with site.router():
        rows = await site.until_recorded(1)

    assert len(rows) == 1


async def test_an_answer_that_cannot_be_recorded_is_refused(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        spool = site.root / "router"
        (spool / "lock").unlink()
        spool.rename(site.root / "gone")
        reply = await client.complete(version)
        (site.root / "gone").rename(spool)
        again = await client.complete(version)
        rows = await site.until_recorded(1)

    assert (reply.status, reply.error) == (503, "audit_unavailable")
    assert again.status == 200
    assert len(rows) == 1


async def test_a_killed_router_loses_and_doubles_nothing(site: Site) -> None:
    await site.add("r0", "r1", options=LONG)
    version = await site.publish_and_serve(1)
    answered: set[str] = set()

    async with aiohttp.ClientSession() as http:
        for start in range(3):
            with _router(site) as child:
                await asyncio.to_thread(child.wait_healthy, 30)
                client = Client(child.url, http)

                async def ask(client: Client, seed: int) -> None:
                    try:
                        reply = await client.complete(version, seed=seed)
                    except aiohttp.ClientError:
                        return
                    assert reply.status == 200
                    answered.add(reply.headers["x-request-id"])

                before = len(answered)
                tasks = [asyncio.create_task(ask(client, n)) for n in range(40)]
                while len(answered) < before + 10:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=0.01)
                if start < 2:
                    child.kill()
                await asyncio.gather(*tasks)
                if start == 2:
                    await asyncio.to_thread(child.terminate, 20)

    counted = Counter(row.request for row in site.rollouts())
    assert set(counted) >= answered
    assert set(counted.values()) == {1}
    assert len(answered) >= 60


def _router(site: Site) -> ChildServer:
    command = [sys.executable, "-m", "policyline", "router", "--listen", "127.0.0.1:{port}"]
    command += ["--ledger", str(site.root / "ledger.db"), "--spool", str(site.root / "spool")]
    return ChildServer(command, log_path=site.root / "router.log")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("name", "episode"),
    [
        (b"\xf5", "õ"),
        ("épisode-1".encode("latin-1"), "épisode-1"),
        ("épisode-2".encode(), "épisode-2"),
        (b"x" * 256, "x" * 256),
    ],
)
async def test_a_session_of_any_bytes_is_recorded(
    site: Site, name: bytes, episode: str, streams: bool
) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    content = {"model": policy_name("trl-policy", version), "prompt": [5], "stream": streams}

    async with site.router() as client:
        answer = await client.raw(
            b"host: x", b"x-policyline-session: " + name, body=json.dumps(content).encode()
        )
        (row,) = await site.until_recorded(1)

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"HTTP/1.1") == 1
    assert (row.status, row.episode) == (200, episode)


async def test_long_sessions_differ_by_their_digest(site: Site) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)
    long = "é" * 257
    digest = f"sha256:{hashlib.sha256(long.encode()).hexdigest()}"

    async with site.router() as client:
        await client.complete("trl-policy", user=long)
        await client.complete("trl-policy", headers={"x_policyline_session": long})
        before = (await client.get("/status")).content["sessions"]
        await client.complete("trl-policy", user=long + "x")
        after = (await client.get("/status")).content["sessions"]
        rows = await site.until_recorded(3)

    assert (before, after) == (1, 2)
    assert [row.episode for row in rows[:2]] == [digest, digest]
    assert len({row.episode for row in rows}) == 2


async def test_mixed_episodes_are_found(site: Site) -> None:
    await site.add("r0")
    first = await site.publish_and_serve(1)
    async with site.router() as client:
        for episode in ("mixed", "pure"):
            await client.complete(first, user=episode)
        await client.complete(first)
        second = await site.publish_and_serve(2)
        await client.complete(second, user="mixed")
        await client.complete(second)
        await site.until_recorded(5)

    (found,) = site.ledger.mixed_episodes("trl-policy")
    assert (found.episode, found.requests) == ("mixed", {first: 1, second: 1})
    assert site.ledger.mixed_episodes("trl-policy", run="another") == []

    command = [sys.executable, "-m", "policyline", "ledger", "rollouts", "--mixed", "--json"]
    command += ["--ledger", str(site.root / "ledger.db")]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert json.loads(out)["episode"] == "mixed"
