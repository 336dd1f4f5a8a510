"""The trainer API when something is missing: replicas, fields, or the backend's own sense."""

from __future__ import annotations

import logging

import pytest

from policyline.ledger.errors import Conflict
from policyline.trainers.adapter import TrainerAdapter
from tests.integration.router.site import Site

BASE = "/t/my-run"


class FailingTrainer:
    """A backend whose calls raise."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def load(self, run: str, name: str, path: str) -> int:
        raise self._error

    async def knows(self, run: str) -> bool:
        raise self._error

    async def version(self, run: str, name: str) -> int | None:
        raise self._error

    async def pause(self, run: str) -> bool:
        raise self._error

    async def resume(self, run: str) -> None:
        raise self._error

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("path", ["/v1/models", "/server_info"])
async def test_questions_about_an_engine_need_a_replica(site: Site, path: str) -> None:
    async with site.router(trainer=TrainerAdapter(site.ledger, site.storage)) as client:
        without = await client.get(BASE + path)
        await site.add("r0")
        await site.doubles["r0"].kill()
        reply = without
        while reply.error == "no_replica":
            reply = await client.get(BASE + path)

    assert (without.status, without.error) == (503, "no_replica")
    assert (reply.status, reply.error) == (503, "replica_unreachable")
    assert "retry-after" in reply.headers


@pytest.mark.parametrize("content", [{}, {"lora_name": ""}, {"lora_name": 1}])
async def test_an_unload_names_an_adapter(site: Site, content: dict[str, object]) -> None:
    async with site.router(trainer=TrainerAdapter(site.ledger, site.storage)) as client:
        reply = await client.post(f"{BASE}/v1/unload_lora_adapter", content)
        load = await client.post(f"{BASE}/v1/load_lora_adapter", content)

    assert (reply.status, reply.error) == (400, "InvalidUserInput")
    assert (load.status, load.error) == (400, "InvalidUserInput")


async def test_what_the_ledger_refuses_is_a_conflict(site: Site) -> None:
    trainer = FailingTrainer(Conflict("run 'my-run' is closed"))
    async with site.router(trainer=trainer) as client:
        reply = await client.post(f"{BASE}/pause", {})

    assert (reply.status, reply.error) == (409, "ledger_refuses")
    assert "my-run" in reply.content["error"]["message"]


async def test_a_bug_is_a_500_and_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async with site.router(trainer=FailingTrainer(RuntimeError("a secret"))) as client:
        reply = await client.complete("trl-policy-v1", prefix=BASE)
        again = await client.get("/health")

    assert (reply.status, reply.error) == (500, "router_error")
    assert "secret" not in reply.content["error"]["message"]
    assert again.status == 503, "the router goes on"
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "router_error"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
