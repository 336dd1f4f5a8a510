"""An unmodified trainer behind /t/<run>: what TRL 1.16 calls, and what becomes of it."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from yarl import URL

from policyline.demo.synthetic import write_adapter
from policyline.ledger.manifest import Manifest
from policyline.ledger.settings import RunSettings
from policyline.trainers.adapter import TrainerAdapter
from policyline.trainers.settings import TrainerSettings
from tests.integration.router.site import Client, Reply, Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RULES = RunSettings(max_staleness=2, ready_grace_s=0.0)
BASE = "/t/my-run"


@asynccontextmanager
async def behind(site: Site, name: str = "router", **options: Any) -> AsyncIterator[Client]:
    """A router for trainers."""
    trainer = TrainerAdapter(site.ledger, site.storage, TrainerSettings(run=RULES, **options))
    async with site.router(name, trainer=trainer) as client:
        yield client


def save(site: Site, number: int, seed: int) -> Path:
    """As TRL: an existing directory of the name is replaced."""
    directory = site.root / "out" / ".vllm_lora" / f"trl-policy-v{number}"
    shutil.rmtree(directory, ignore_errors=True)
    return write_adapter(directory, seed)


async def sync(client: Client, site: Site, number: int, seed: int, base: str = BASE) -> Reply:
    """One sync of TRL 1.16."""
    assert (await client.post(f"{base}/pause?mode=keep", {})).status == 200
    directory = save(site, number, seed)
    content = {"lora_name": f"trl-policy-v{number}", "lora_path": str(directory)}
    reply = await client.post(f"{base}/v1/load_lora_adapter", {**content, "load_inplace": False})
    assert (await client.post(f"{base}/resume", {})).status == 200
    if number > 3:
        stale = {"lora_name": f"trl-policy-v{number - 3}"}
        assert (await client.post(f"{base}/v1/unload_lora_adapter", stale)).status == 200
        shutil.rmtree(directory.parent / f"trl-policy-v{number - 4}", ignore_errors=True)
    return reply


async def test_what_a_trainer_asks_before_it_begins(site: Site) -> None:
    async with behind(site) as client:
        assert (await client.get(f"{BASE}/health")).status == 503, "no replica yet"
        await site.add("r0", slots=5)
        async with site.running("other", trainer=None) as (_, plain):
            assert (await plain.get(f"{BASE}/health")).status == 404
        while (health := await client.get(f"{BASE}/health")).status != 200:
            assert health.status == 503
        info = (await client.get(f"{BASE}/server_info?config_format=json")).content
        models = (await client.get(f"{BASE}/v1/models")).content
        size = (await client.get(f"{BASE}/get_world_size")).content

    assert info["vllm_config"]["lora_config"]["max_loras"] == 5, "as the ledger knows it"
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
    assert models["data"][0]["max_model_len"] == 256
    assert size == {"world_size": 1}


async def test_a_training_run(site: Site) -> None:
    await site.add("r0", "r1")
    await site.publish_and_serve(99, run="former")

    async with site.following(), behind(site) as client:
        for number in range(1, 7):
            reply = await sync(client, site, number, seed=number)
            assert reply.status == 200, reply.body
            answer = await client.complete(f"trl-policy-v{number}", prefix=BASE, logprobs=0)
            assert answer.status == 200
            assert answer.headers["x-policy-version"] == reply.headers["x-policy-version"]
        paused = (await client.get(f"{BASE}/is_paused")).content
        old = await client.complete("trl-policy-v1", prefix=BASE)
        never = await client.complete("trl-policy-v7", prefix=BASE)
        rows = await site.until_recorded(6)

    versions = [v for v in site.ledger.versions(run="my-run") if v.digest]
    assert [v.version for v in versions] == [2, 3, 4, 5, 6, 7], "one behind the trainer's numbers"
    metadata = [Manifest.from_text(v.manifest or "").metadata for v in versions]
    assert [m["trainer_name"] for m in metadata] == [f"trl-policy-v{n}" for n in range(1, 7)]
    assert paused == {"is_paused": False}
    assert not site.ledger.view("trl-policy").line.paused
    assert (old.status, old.error) == (410, "policy_evicted")
    assert (never.status, never.error) == (404, "policy_unknown")
    assert [(r.asked_name, r.version) for r in rows] == [
        (f"trl-policy-v{n}", n + 1) for n in range(1, 7)
    ]


async def test_a_run_from_scratch_and_a_resume_do_not_collide(site: Site) -> None:
    await site.add("r0")
    versions_sent: list[str] = []

    async with site.following():
        for start, numbers in enumerate([range(1, 5), range(1, 4), range(3, 5)]):
            async with behind(site) as client:  # the router is restarted as well
                for number in numbers:
                    # the first version of each start has the same bytes: B is zero, same seed
                    seed = 1 if number == 1 else 100 * start + number
                    reply = await sync(client, site, number, seed)
                    assert reply.status == 200, reply.body
                    version = reply.headers["x-policy-version"]
                    versions_sent.append(version)
                    answer = await client.complete(f"trl-policy-v{number}", prefix=BASE)
                    assert answer.headers["x-policy-version"] == version

    assert versions_sent == [str(n) for n in range(1, 10)]


async def test_another_run_in_the_url_does_not_end_a_training(site: Site) -> None:
    await site.add("r0")

    async with site.following(), behind(site) as client:
        assert (await sync(client, site, 1, seed=1)).status == 200
        other = await sync(client, site, 1, seed=2, base="/t/my-rnu")
        again = await sync(client, site, 2, seed=3)
    async with site.following(), behind(site, follow_after_s=0.0) as client:
        assert (await sync(client, site, 1, seed=1)).status == 200, "nobody holds it any more"
        after = await sync(client, site, 1, seed=4, base="/t/next")

    assert other.status == 409
    assert "'my-run' of line 'trl-policy' is in training" in other.body.decode()
    assert "close-run my-run" in other.body.decode()
    assert (again.status, again.headers["x-policy-version"]) == (200, "2")
    assert after.status == 200


async def test_a_load_again_is_the_same_version(site: Site) -> None:
    await site.add("r0")

    async with site.following(), behind(site) as client:
        first = await sync(client, site, 1, seed=1)
        again = await sync(client, site, 1, seed=1)
    async with site.following(), behind(site) as client:
        restarted = await sync(client, site, 1, seed=1)

    assert {r.headers["x-policy-version"] for r in (first, again, restarted)} == {"1"}


async def test_two_routers_know_the_same_names(site: Site) -> None:
    await site.add("r0")

    async with site.following(), behind(site, "one") as one, behind(site, "two") as two:
        first = await sync(one, site, 1, seed=1)
        assert (await two.complete("trl-policy-v1", prefix=BASE)).headers[
            "x-policy-version"
        ] == first.headers["x-policy-version"]
        second = await sync(two, site, 1, seed=2)
        third = await sync(one, site, 2, seed=3)
        replies = [await one.complete("trl-policy-v1", prefix=BASE) for _ in range(2)]

    assert [r.status for r in (first, second, third)] == [200, 200, 200], third.body
    assert {r.headers["x-policy-version"] for r in replies} == {second.headers["x-policy-version"]}


async def test_a_load_returns_when_it_is_committed_if_so_told(site: Site) -> None:
    await site.add("r0")

    async with behind(site, returns="committed") as client:
        reply = await sync(client, site, 1, seed=1)
        assert site.ledger.view("trl-policy").current is None
        async with site.following():
            answer = await client.complete("trl-policy-v1", prefix=BASE)

    assert (reply.status, answer.status) == (200, 200)


async def test_a_wait_for_ready_is_bounded(site: Site) -> None:
    await site.add("r0")

    async with behind(site, ready_wait_s=0.2) as client:
        assert (await sync(client, site, 1, seed=1)).status == 200


async def test_a_version_that_every_replica_rejects_ends_the_load(site: Site) -> None:
    await site.add("r0")

    async with site.following(rejects=True), behind(site) as client:
        reply = await sync(client, site, 1, seed=1)

    assert (reply.status, reply.error) == (500, "load_refused")
    assert "no good" in reply.content["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ({}, 400),
        ({"lora_name": "trl-policy-v1"}, 400),
        ({"lora_name": "trl-policy-v1", "lora_path": "/nowhere"}, 400),
        ({"lora_name": 3, "lora_path": "/nowhere"}, 400),
    ],
)
async def test_loads_that_are_none(site: Site, content: dict[str, Any], status: int) -> None:
    await site.add("r0")

    async with behind(site) as client:
        reply = await client.post(f"{BASE}/v1/load_lora_adapter", content)

    assert reply.status == status, reply.body
    assert site.ledger.versions() == []


async def test_a_rolled_back_trainer_is_told(site: Site) -> None:
    await site.add("r0")

    async with site.following(), behind(site) as client:
        await sync(client, site, 1, seed=1)
        await sync(client, site, 2, seed=2)
        site.ledger.roll_back("trl-policy", 1, "it got worse")
        refused = await sync(client, site, 3, seed=3)
        restarted = await sync(client, site, 2, seed=4)

    assert refused.status == 409
    assert "it got worse" in refused.content["error"]["message"]
    assert restarted.status == 200


async def test_a_pause_is_forwarded_if_so_told(site: Site) -> None:
    await site.add("r0")

    async with site.following(), behind(site, forward_pause=True) as client:
        await sync(client, site, 1, seed=1)
        await client.post(f"{BASE}/pause?mode=keep", {})
        paused = site.ledger.view("trl-policy").line.paused
        await client.post(f"{BASE}/resume", {})

    assert paused
    assert not site.ledger.view("trl-policy").line.paused


async def test_names_are_known_while_the_ledger_is_unreachable(site: Site) -> None:
    await site.add("r0")

    async with site.following(), behind(site) as client:
        await sync(client, site, 1, seed=1)
        site.ledger.unreachable = True
        known = await client.complete("trl-policy-v1", prefix=BASE)
        unknown = await client.complete("trl-policy-v2", prefix=BASE)
        load = await sync(client, site, 2, seed=2)
        site.ledger.unreachable = False

    assert known.status == 200
    assert (unknown.status, unknown.error) == (503, "ledger_unreachable")
    assert (load.status, load.error) == (503, "ledger_unreachable")


async def test_the_alias_cannot_be_loaded(site: Site) -> None:
    await site.add("r0")
    content = {"lora_name": "trl-policy", "lora_path": str(save(site, 1, seed=1))}

    async with behind(site) as client:
        reply = await client.post(f"{BASE}/v1/load_lora_adapter", content)

    assert (reply.status, reply.error) == (400, "InvalidUserInput")
    assert "'trl-policy'" in reply.content["error"]["message"]
    assert "--alias" in reply.content["error"]["message"]
    assert site.ledger.versions() == []


@pytest.mark.parametrize("run", ["nosuchrun", "%ff", "a%0ab", "", "x" * 300])
async def test_the_alias_of_an_unknown_run(site: Site, run: str) -> None:
    await site.add("r0")
    await site.publish_and_serve(1, run="another")

    async with behind(site) as client:
        url = URL(f"{client.url}/t/{run}/v1/completions", encoded=True)
        async with client.http.post(url, json={"model": "trl-policy", "prompt": [5]}) as answer:
            content = await answer.json()

    assert (answer.status, content["error"]["type"]) == (404, "run_unknown")
    assert len(content["error"]["message"]) < 400


async def test_the_alias_of_a_run_needs_no_ledger_once_it_is_known(
    site: Site,
) -> None:
    await site.add("r0")
    version = await site.publish_and_serve(1, run="my-run")

    async with behind(site) as client:
        first = await client.complete("trl-policy", prefix=BASE)
        site.ledger.unreachable = True
        known = await client.complete("trl-policy", prefix=BASE)
        unknown = await client.complete("trl-policy", prefix="/t/another")
        site.ledger.unreachable = False

    assert [r.headers["x-policy-version"] for r in (first, known)] == [str(version)] * 2
    assert (unknown.status, unknown.error) == (503, "ledger_unreachable")
