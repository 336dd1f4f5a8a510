"""Answers as they pass through: streams, disconnects, back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from policyline.router.rollouts.spool import Spool
from tests.integration.router.site import ENDLESS, LONG, PROMPT, Site, stream


def events(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_stream_is_passed_on_as_it_comes(site: Site) -> None:
    await site.add("r0", options=LONG)
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        await client.complete(version, max_tokens=60, ignore_eos=True)
        await site.until_recorded(1)
        content = {
            "model": f"trl-policy-v{version}",
            "max_tokens": 60,
            "stream_options": {"include_usage": True},
        }
        async with await stream(client, content) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-policy-version"] == str(version)
            first = await answer.content.readany()
            assert len(site.rollouts()) == 1, "nothing is recorded of what is not over"
            assert len(site.doubles["r0"].service.engine.running) == 1
            rest = await answer.read()
        rows = await site.until_recorded(2)

    found = events(first + rest)
    texts = [e["choices"][0]["text"] for e in found if e["choices"]]
    assert len(texts) > 1
    assert found[-1]["usage"]["completion_tokens"] == 60
    assert rows[-1].completion_tokens == rows[0].completion_tokens == 60
    assert rows[-1].prompt_tokens == len(PROMPT)
    assert rows[-1].prefill_s < rows[-1].decode_s


@pytest.mark.parametrize("streams", [False, True])
async def test_chat(site: Site, streams: bool) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    messages = [{"role": "user", "content": "What is 1 plus 2?"}]
    content = {"model": f"trl-policy-v{version}", "messages": messages, "max_tokens": 4}

    async with site.router() as client:
        reply = await client.post("/v1/chat/completions", {**content, "stream": streams})
        (row,) = await site.until_recorded(1)

    assert reply.status == 200
    assert row.version == version
    if streams:
        assert events(reply.body)[0]["object"] == "chat.completion.chunk"
    else:
        assert reply.content["object"] == "chat.completion"
        assert row.completion_tokens == 4


@pytest.mark.parametrize("streams", [False, True])
async def test_a_disconnect_ends_the_request_at_the_replica(site: Site, streams: bool) -> None:
    await site.add("r0", options=ENDLESS)
    version = await site.publish_and_serve(1)
    engine = site.doubles["r0"].service.engine
    content = {"model": f"trl-policy-v{version}", "max_tokens": 200, "stream": streams}

    async with site.running() as (router, client):
        async with aiohttp.ClientSession() as leaving:
            task = asyncio.create_task(
                leaving.post(
                    client.url + "/v1/completions",
                    json={"prompt": PROMPT, "ignore_eos": True, **content},
                )
            )
            await site.until(lambda: len(engine.running) == 1)
            if streams:
                answer = await task
                await answer.content.readany()
                answer.close()
            else:
                task.cancel()
        await site.until(lambda: not engine.running)
        (row,) = await site.until_recorded(1)
        assert router.affinity.in_flight().total() == 0

    assert row.status == 499


async def test_a_client_that_does_not_read_slows_the_replica_and_fills_no_memory(
    site: Site,
) -> None:
    """Back-pressure: what the client does not take is not read from the replica."""
    sent = 0

    async def firehose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while sent < 1 << 28:
            writer.write(b"data: x\n\n" * 7000)
            try:
                await writer.drain()
            except ConnectionError:
                break
            sent += 63_000
        writer.close()

    server = await asyncio.start_server(firehose, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await site.add("r0", url=f"http://127.0.0.1:{port}")
    version = await site.publish_and_serve(1)
    async with site.router() as client:
        content = {"model": f"trl-policy-v{version}", "stream": True, "prompt": "x"}
        body = json.dumps(content).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url[-5:].strip(":")))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's has it
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.3)
        writer.close()
    server.close()

    assert 0 < sent < 1 << 26


async def test_a_broken_stream_is_broken_for_the_client(site: Site) -> None:
    await site.add("r0", "r1", options=LONG)
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        content = {"model": f"trl-policy-v{version}", "max_tokens": 200}
        async with await stream(client, content) as answer:
            await answer.content.readany()
            await site.doubles[answer.headers["x-policy-replica"]].kill()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        (row,) = await site.until_recorded(1)

    assert row.status == 502


async def test_an_error_in_a_stream_cuts_it_short(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: no second answer within the first one's body."""
    await site.add("r0")
    version = await site.publish_and_serve(1)
    append, failures = Spool.append, [RuntimeError("odd")]

    def fails_once(spool: Spool, values: Sequence[object]) -> None:
        if failures:
            raise failures.pop()
        append(spool, values)

    async with site.router() as client:
        monkeypatch.setattr(Spool, "append", fails_once)
        content = {"model": f"trl-policy-v{version}", "prompt": PROMPT, "stream": True}
        with contextlib.suppress(ConnectionError):
            answer = await client.raw(b"host: x", body=json.dumps(content).encode())
            assert answer.count(b"HTTP/1.1") == 1
            assert not answer.endswith(b"0\r\n\r\n"), "it looks whole"
        (row,) = await site.until_recorded(1)

    assert row.status == 502
