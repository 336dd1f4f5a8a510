"""Which requests are accepted: paths, keys, bodies, limits; and what the router reports."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions
from policyline.trainers.adapter import TrainerAdapter
from tests.integration.router.site import LONG, PROMPT, Site

KEYED = ServiceOptions(EngineOptions(), api_key="engine-key")


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


async def test_invalid_bodies(site: Site) -> None:
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
async def test_bodies_that_contradict_their_content_encoding(site: Site, path: str) -> None:
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


async def test_a_key_of_any_bytes_is_checked(site: Site) -> None:
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
async def test_headers_of_malformed_http_are_not_logged(
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


async def test_requests_above_max_in_flight_are_refused(site: Site) -> None:
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


async def test_health_answers_head_requests(site: Site) -> None:
    await site.add("r0")
    found = []

    async with site.router(trainer=TrainerAdapter(site.ledger, site.storage)) as client:
        for path in ("/health", "/t/run/health"):
            async with client.http.head(client.url + path) as answer:
                found.append((answer.status, await answer.read()))

    assert found == [(503, b""), (200, b"")], "nothing is current, and a replica has joined"


async def test_a_long_name_is_shortened_in_errors(site: Site) -> None:
    await site.add("r0")

    async with site.router(trainer=TrainerAdapter(site.ledger, site.storage)) as client:
        for prefix in ("", "/t/run"):
            reply = await client.complete("x" * 100_000, prefix=prefix)
            assert (reply.status, reply.error) == (404, "policy_unknown")
            assert len(reply.body) < 500
        lost = await client.post("/t/run/v1/nothing", {})

    assert lost.content["error"]["message"] == "POST /t/run/v1/nothing is not served here"


async def test_models_metrics_and_status(site: Site) -> None:
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
