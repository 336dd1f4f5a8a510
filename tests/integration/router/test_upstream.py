"""What the router reads from replicas, and replicas that answer with something else."""

from __future__ import annotations

import asyncio
import json

import pytest

from policyline.router.errors import UpstreamBroken, UpstreamUnreachable
from policyline.router.upstream import Upstream
from tests.integration.router.site import PROMPT, Site, scripted_replica

METRICS = b'vllm:cache_config_info{block_size="32",cache_dtype="auto"} 1.0'
INFO = json.dumps({"vllm_config": {"cache_config": {"block_size": 64}}}).encode()


def upstream() -> Upstream:
    return Upstream(api_key="key", connect_timeout_s=2.0, read_timeout_s=2.0)


@pytest.mark.parametrize(
    ("answers", "tokens"),
    [
        ({"/metrics": (200, METRICS)}, 32),
        ({"/metrics": (200, b""), "/server_info": (200, INFO)}, 64),
        ({"/metrics": (200, b""), "/server_info": (200, b"{}")}, 16),
        ({"/metrics": (200, b""), "/server_info": (200, b"no JSON")}, 16),
        ({}, 16),
    ],
)
async def test_the_block_size_of_a_replica(
    site: Site, answers: dict[str, tuple[int, bytes]], tokens: int
) -> None:
    async with scripted_replica(answers) as url:
        await site.add("r0", url=url)
        async with site.router() as client:
            status = (await client.get("/status")).content

    assert status["block_tokens"] == tokens


async def test_small_answers_that_cannot_be_used() -> None:
    answers = {"/bad": (200, b"no JSON"), "/gone": (404, b"{}"), "/good": (200, b"[1]")}
    async with scripted_replica(answers) as url, upstream() as client:
        assert await client.get_json(f"{url}/good") == [1]
        with pytest.raises(UpstreamUnreachable, match="does not answer with JSON"):
            await client.get_json(f"{url}/bad")
        with pytest.raises(UpstreamUnreachable, match="answers 404"):
            await client.get_text(f"{url}/gone")
    async with upstream() as client:
        with pytest.raises(UpstreamUnreachable):
            await client.get_text(f"{url}/good")
        with pytest.raises(UpstreamUnreachable, match="cannot connect"):
            await client.post(f"{url}/good", b"{}", "id")


async def test_a_replica_that_is_no_http_server_breaks_the_attempt(site: Site) -> None:
    async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"not HTTP\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, upstream() as client:
        with pytest.raises(UpstreamBroken, match="no answer"):
            await client.post(f"http://127.0.0.1:{port}/", b"{}", "id")


async def test_a_replica_without_the_route_is_not_a_missing_model(site: Site) -> None:
    async with scripted_replica({}) as url:
        await site.add("r0", url=url)
        version = await site.publish_and_serve(1)
        async with site.running(ready_wait_s=0.5) as (router, client):
            reply = await client.complete(version)
            metrics = await client.get("/metrics")

    assert (reply.status, reply.error) == (502, "replica_failed")
    assert "no such route" in reply.content["error"]["message"]
    assert b'policyline_router_retries_total{why="broken"} 3.0' in metrics.body
    assert b'why="denied"' not in metrics.body
    assert router.affinity.in_flight().total() == 0


async def test_a_large_answer_keeps_its_length(site: Site) -> None:
    body = json.dumps({"text": "x" * (1 << 21), "usage": {"prompt_tokens": 3}}).encode()
    async with scripted_replica({"/v1/completions": (200, body)}) as url:
        await site.add("r0", url=url)
        version = await site.publish_and_serve(1)
        async with site.router() as client:
            reply = await client.complete(version, prompt=PROMPT)
            (row,) = await site.until_recorded(1)

    assert (reply.status, reply.body) == (200, body)
    assert reply.headers["content-length"] == str(len(body))
    assert (row.status, row.prompt_tokens) == (200, 3)
