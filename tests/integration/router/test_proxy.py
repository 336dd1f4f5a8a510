"""What passes through: streams, disconnects, limits, keys, paths; and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import re
import socket
import zlib
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.service import ServiceOptions
from policyline.errors import ListenFailed
from policyline.ledger import EngineFacts
from policyline.router import Router
from policyline.router.errors import SpoolUnusable
from policyline.router.gate import Seat, Serve
from policyline.router.rollouts.spool import Spool
from policyline.trainers.adapter import TrainerAdapter
from tests.integration.router.site import LONG, PROMPT, Client, Site

ENDLESS = ServiceOptions(EngineOptions(), step_delay_s=0.2)
"""200 tokens take longer than any wait here."""
KEYED = ServiceOptions(EngineOptions(), api_key="engine-key")


async def stream(client: Client, content: dict[str, Any], path: str = "/v1/completions") -> Any:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **content}
    return client.http.post(client.url + path, json=body)


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
async def test_a_client_that_leaves_ends_its_request_at_the_replica(
    site: Site, streams: bool
) -> None:
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


async def test_a_reader_that_does_not_read_holds_back_the_replica_not_our_memory(
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


async def test_an_error_in_a_stream_breaks_it_off(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: no second answer within the first one's body."""
    await site.add("r0")
    version = await site.publish_and_serve(1)
    note, failures = Spool.note, [RuntimeError("odd")]

    def fails_once(spool: Spool, values: Sequence[object]) -> None:
        if failures:
            raise failures.pop()
        note(spool, values)

    async with site.router() as client:
        monkeypatch.setattr(Spool, "note", fails_once)
        content = {"model": f"trl-policy-v{version}", "prompt": PROMPT, "stream": True}
        with contextlib.suppress(ConnectionError):
            answer = await client.raw(b"host: x", body=json.dumps(content).encode())
            assert answer.count(b"HTTP/1.1") == 1
            assert not answer.endswith(b"0\r\n\r\n"), "it looks whole"
        (row,) = await site.until_recorded(1)

    assert row.status == 502


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


async def test_nobody_answers(site: Site) -> None:
    await site.add("r0", "r1")
    version = await site.publish_and_serve(1)
    for double in site.doubles.values():
        await double.kill()

    async with site.router(ready_wait_s=0.5) as client:
        reply = await client.complete(version)

    assert (reply.status, reply.error) == (503, "policy_not_ready")
    assert "retry-after" in reply.headers


async def test_a_request_that_every_engine_fails_on_does_not_meet_all_of_them(site: Site) -> None:
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


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["evicted", "left", "restarted"])
async def test_a_request_leaves_a_hung_replica_whose_ack_is_voided(
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
    assert b'policyline_router_retries_total{why="voided"} 1.0' in metrics.body
    assert [(row.replica, row.status) for row in rows] == [("r1", 200)]


@pytest.mark.parametrize("how", ["voided", "withdrawn"])
async def test_a_request_stays_where_only_its_own_replica_can_answer(site: Site, how: str) -> None:
    """Nobody else serves the version, or nobody may any more: an answer in flight is right."""
    await site.add("r0", options=LONG)
    version = await site.publish_and_serve(1)
    await site.publish_and_serve(2)

    async with site.running() as (router, client):
        task = asyncio.create_task(client.complete(version, max_tokens=100, ignore_eos=True))
        await site.until(lambda: router.affinity.in_flight()["r0"] == 1)
        if how == "voided":
            await evict(site, "r0", version)
        else:
            await asyncio.to_thread(site.ledger.withdraw, "trl-policy", version, "it was bad")
        await site.until(lambda: not served_by(router, version))
        assert not task.done()
        reply = await task

    assert (reply.status, reply.replica) == (200, "r0")


def served_by(router: Router, version: int) -> Sequence[Seat]:
    assert router.keeper.gate is not None
    verdict = router.keeper.gate.judge_version(version)
    return verdict.seats if isinstance(verdict, Serve) else ()


async def evict(site: Site, replica: str, version: int) -> None:
    """Say, as a watcher, that the replica does not serve the version any more."""
    digest = site.ledger.version("trl-policy", version).digest or ""
    await asyncio.to_thread(
        site.ledger.evicted, site.members[replica], version, digest=digest, reason="drift"
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/collective_rpc"),
        ("POST", "/pause"),
        ("GET", "/server_info"),
        ("GET", "/v1/completions"),
        ("POST", "/invocations"),
        ("GET", "/"),
        ("POST", "/v1/completions/../../pause"),
        ("POST", "/t/run/v1/completions"),
    ],
)
async def test_only_listed_paths_reach_an_engine(site: Site, method: str, path: str) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        before = site.doubles["r0"].requests.total()
        async with client.http.request(
            method,
            client.url + path,
            json={"model": f"trl-policy-v{version}", "prompt": PROMPT},
        ) as answer:
            status, content = answer.status, await answer.json()

        assert (status, content["error"]["type"]) == (404, "no_such_route")
        assert site.doubles["r0"].requests.total() == before


async def test_keys_on_both_sides(site: Site) -> None:
    await site.add("r0", options=KEYED)
    version = await site.publish_and_serve(1)

    async with site.router(api_key="router-key", upstream_key="engine-key") as client:
        refused = await client.complete(version)
        health = await client.get("/health")
        hidden = await client.get("/status")
        client.headers["authorization"] = "Bearer router-key"
        reply = await client.complete(version)
        client.headers["authorization"] = "Bearer engine-key"
        wrong = await client.complete(version)
        del client.headers["authorization"]
        client.url = client.url.replace("://", "://trl:router-key@")
        in_the_url = await client.complete(version)

    assert in_the_url.status == 200
    assert (refused.status, refused.error) == (401, "unauthorized")
    assert (health.status, hidden.status) == (200, 401)
    assert reply.status == 200
    assert wrong.status == 401


async def test_a_replica_that_refuses_our_key_is_no_fault_of_the_client(site: Site) -> None:
    await site.add("r0", options=KEYED)
    version = await site.publish_and_serve(1)

    async with site.router(upstream_key="wrong") as client:
        reply = await client.complete(version)

    assert (reply.status, reply.error) == (502, "replica_refuses_router")
    assert "replica r0 answers 401" in reply.content["error"]["message"]


async def test_bodies_that_are_no_requests(site: Site) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)

    async with site.router(max_body_bytes=1000) as client:
        replies = []
        for body in (b"", b"{", b"[]", b'{"model": "\xff"}', b"[" * 500):
            async with client.http.post(client.url + "/v1/completions", data=body) as answer:
                replies.append((answer.status, (await answer.json())["error"]["type"]))
        long = await client.complete(1, prompt=[1] * 1000)

    assert set(replies) == {(400, "invalid_json")}
    assert (long.status, long.error) == (413, "request_too_large")


@pytest.mark.parametrize("path", ["/v1/completions", "/t/run/v1/load_lora_adapter"])
async def test_bodies_that_are_not_what_their_headers_say(site: Site, path: str) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)
    content = json.dumps({"model": f"trl-policy-v{version}", "prompt": PROMPT}).encode()
    bodies = [
        ("gzip", content, 400, "invalid_body"),
        ("gzip", gzip.compress(content)[:-9], 400, "invalid_body"),
        ("gzip", gzip.compress(content) + gzip.compress(b" "), 400, "invalid_body"),
        ("gzip", gzip.compress(bytes(1 << 20)), 413, "request_too_large"),
        ("br", content, 415, "unknown_coding"),
        ("zstd", content, 415, "unknown_coding"),
        ("x" * 300, content, 415, "unknown_coding"),
    ]

    trainer = TrainerAdapter(site.ledger, site.storage)
    async with site.router(max_body_bytes=1000, trainer=trainer) as client:
        for coding, body, status, code in bodies:
            reply = await client.send(path, body, content_encoding=coding)
            assert (reply.status, reply.error) == (status, code), coding
            assert len(reply.body) < 500
        for coding, pack in (("GZIP", gzip.compress), ("deflate", zlib.compress)):
            reply = await client.send("/v1/completions", pack(content), content_encoding=coding)
            assert reply.status == 200, reply.body


async def test_a_key_in_whatever_bytes_is_checked(site: Site) -> None:
    async with site.router(api_key="router-kéy") as client:
        for given, status in (
            (b"Bearer \xff\xfe", b"401"),
            (b"Basic \xff", b"401"),
            ("Bearer router-kéy".encode(), b"400"),
        ):
            answer = await client.raw(b"host: x", b"authorization: " + given)
            assert answer.split()[1] == status


@pytest.mark.parametrize(
    "line",
    [
        b"authorization: Bearer router-key\x01",
        b"authorization : Bearer router-key",
        b"authorization: Bearer\r\n router-key",
        b"authorization: Bearer router-key" + b"x" * 9000,
        b"",
    ],
)
async def test_malformed_http_does_not_show_its_headers_in_the_log(
    site: Site, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    async with site.router(api_key="router-key") as client:
        caplog.set_level(logging.INFO)
        caplog.clear()
        answer = await client.raw(*([b"host: x", line] if line else [b"x: router-key"]))

    assert answer.split()[1] == b"400"
    assert "router-key" not in caplog.text
    assert "Traceback" not in caplog.text
    (record,) = [r for r in caplog.records if r.name == "policyline.http_server"]
    assert "malformed HTTP" in record.message
    assert record.levelno == logging.INFO


async def test_too_many_at_once_are_told_so(site: Site) -> None:
    await site.add("r0", options=LONG)
    version = await site.publish_and_serve(1)

    async with site.router(max_in_flight=2) as client:
        replies = await asyncio.gather(
            *(client.complete(version, max_tokens=10, ignore_eos=True) for _ in range(5))
        )

    counted = sorted(r.status for r in replies)
    assert counted == [200, 200, 503, 503, 503]
    assert {r.error for r in replies if r.status == 503} == {"overloaded"}
    refused = replies[[r.status for r in replies].index(503)].content["error"]["message"]
    assert "2 requests are in flight" in refused
    assert "--max-in-flight" in refused


async def test_a_stop_lets_requests_end_and_takes_no_new_ones(site: Site) -> None:
    await site.add("r0", options=LONG)
    version = await site.publish_and_serve(1)
    engine = site.doubles["r0"].service.engine

    async with aiohttp.ClientSession() as http:
        async with site.router() as inner:
            client = Client(inner.url, http)  # outlives the router
            task = asyncio.create_task(client.complete(version, max_tokens=20, ignore_eos=True))
            await site.until(lambda: len(engine.running) == 1)
            port = int(client.url.rpartition(":")[2])
            refused = asyncio.create_task(_connects_no_more(port))
        reply = await task
        await refused

    assert reply.status == 200
    assert len(site.rollouts()) == 1, "recorded before the end"


async def test_what_a_stop_cuts_off_is_told_so(site: Site) -> None:
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


async def _connects_no_more(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        writer.close()
        await asyncio.sleep(0.01)


async def test_an_address_that_is_taken(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with site.running() as (router, _):
            with pytest.raises(ListenFailed, match=r"127\.0\.0\.1"):
                await router.listen("127.0.0.1", taken.getsockname()[1])


async def test_a_spool_belongs_to_one_router(site: Site) -> None:
    async with site.router("one"):
        with pytest.raises(SpoolUnusable, match="another router"):
            async with site.router("one"):
                pass


async def test_health_is_told_to_a_head_as_well(site: Site) -> None:
    await site.add("r0")
    found = []

    async with site.router(trainer=TrainerAdapter(site.ledger, site.storage)) as client:
        for path in ("/health", "/t/run/health"):
            async with client.http.head(client.url + path) as answer:
                found.append((answer.status, await answer.read()))

    assert found == [(503, b""), (200, b"")], "nothing is current, and a replica has joined"


async def test_a_long_name_is_cut_where_it_is_shown(site: Site) -> None:
    await site.add("r0")

    async with site.router(trainer=TrainerAdapter(site.ledger, site.storage)) as client:
        for prefix in ("", "/t/run"):
            reply = await client.complete("x" * 100_000, prefix=prefix)
            assert (reply.status, reply.error) == (404, "policy_unknown")
            assert len(reply.body) < 500
        lost = await client.post("/t/run/v1/nothing", {})

    assert lost.content["error"]["message"] == "POST /t/run/v1/nothing is not served here"


async def test_what_there_is_to_ask_for(site: Site) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1)

    async with site.router() as client:
        await client.complete(version)
        models = await client.get("/v1/models")
        metrics = await client.get("/metrics")
        status = (await client.get("/status")).content

    assert [m["id"] for m in models.content["data"]] == [f"trl-policy-v{version}", "trl-policy"]
    assert b'policyline_router_answers_total{status="200"} 1.0' in metrics.body
    assert b'policyline_router_choices_total{kind="unmatched"} 1.0' in metrics.body
    assert b"policyline_router_healthy 1.0" in metrics.body
    assert status["replicas"]["r0"]["routed"] == 1
    assert status["versions"][f"trl-policy-v{version}"]["serving"] == ["r0"]
    assert status["block_tokens"] == 128, "as the double says"
