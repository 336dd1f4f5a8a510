"""The line's pause is a desired state: every engine is made to match it, over all restarts."""

from __future__ import annotations

import asyncio

import pytest

from policyline.engines.simulated.faults import Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from tests.engines import PROMPT, until
from tests.integration.watcher.site import CountingClient, Site

LINE = "trl-policy"


async def until_paused(engine: SimulatedServer, *, paused: bool = True) -> None:
    async def matches() -> bool:
        return (engine.service.engine.paused is not None) == paused

    await until(matches)


async def test_pause_and_resume_reach_the_engine(site: Site, double: SimulatedServer) -> None:
    async with site.sidecar(double, poll_interval_s=1000.0):
        await site.publish_and_wait(1)

        site.ledger.pause(LINE, "maintenance")
        await until_paused(double)
        assert double.service.engine.paused == "keep"
        assert site.ledger.view(LINE).acked_by(1) == ("r0",)

        site.ledger.resume(LINE)
        await until_paused(double, paused=False)


async def test_a_version_published_meanwhile_waits_for_the_resume(
    site: Site, double: SimulatedServer
) -> None:
    async with site.sidecar(double) as running:
        await site.publish_and_wait(1)
        site.ledger.pause(LINE, "maintenance")
        await until_paused(double)
        await site.publish(2)
        await running.until_status('"reason":"paused"')
        assert "trl-policy-v2" not in running.client.loads
        assert (await running.get("/readyz")).text == "ok"
        metrics = (await running.get("/metrics")).text
        assert 'policyline_pending_versions{reason="paused"} 1.0' in metrics

        site.ledger.resume(LINE)

        await site.until_acked(2)


async def test_a_restarted_engine_is_paused_again(site: Site, double: SimulatedServer) -> None:
    async with site.sidecar(double):
        await site.publish_and_wait(1)
        site.ledger.pause(LINE, "maintenance")
        await until_paused(double)

        await double.restart()

        await until_paused(double)
        assert not double.service.registry


async def test_a_crash_of_the_sidecar_leaves_no_engine_paused(
    site: Site, double: SimulatedServer
) -> None:
    async with site.sidecar(double) as first:
        await site.publish_and_wait(1)
        site.ledger.pause(LINE, "maintenance")
        await until_paused(double)
        await first.kill()
    site.ledger.resume(LINE)

    async with site.sidecar(double):
        await until_paused(double, paused=False)
        await site.publish_and_wait(2)


async def test_a_new_sidecar_keeps_up_the_pause(site: Site, double: SimulatedServer) -> None:
    async with site.sidecar(double) as first:
        await site.publish_and_wait(1)
        await first.kill()
    site.ledger.pause(LINE, "maintenance")

    async with site.sidecar(double):
        await until_paused(double)


async def test_the_pause_of_a_trainer_that_crashed_is_undone(
    site: Site, double: SimulatedServer
) -> None:
    async with site.sidecar(double), CountingClient(double.url) as trainer:
        await site.publish_and_wait(1)
        await trainer.pause("keep")

        answer = await trainer.complete("trl-policy-v1", PROMPT, 3, ignore_eos=True)

    assert len(answer.token_ids) == 3


async def test_requests_in_flight_go_on_after_the_resume(
    site: Site, double: SimulatedServer
) -> None:
    async with site.sidecar(double), CountingClient(double.url) as client:
        await site.publish_and_wait(1)
        site.ledger.pause(LINE, "maintenance")
        await until_paused(double)
        asked = asyncio.create_task(client.complete("trl-policy-v1", PROMPT, 3, ignore_eos=True))
        site.ledger.resume(LINE)

        assert len((await asked).token_ids) == 3


async def test_without_development_routes_status_and_log_say_so(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        SimulatedServer(ServiceOptions(dev_mode=False)) as engine,
        site.sidecar(engine) as running,
    ):
        await site.publish_and_wait(1)
        site.ledger.pause(LINE, "maintenance")

        await running.until_status("VLLM_SERVER_DEV_MODE=1")
        await site.publish(2)
        await site.until_acked(2)
    assert caplog.text.count("pause unsupported: the line is to be paused") == 1


@pytest.mark.parametrize("fault", [Fault("pause", "fail", times=2), Fault("pause", "hang")])
async def test_a_pause_that_fails_or_is_not_answered_is_tried_again(
    site: Site, double: SimulatedServer, fault: Fault
) -> None:
    async with site.sidecar(double):
        await site.publish_and_wait(1)
        double.script(fault)
        site.ledger.pause(LINE, "maintenance")
        await until_paused(double)
