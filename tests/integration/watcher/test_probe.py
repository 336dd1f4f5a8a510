"""The probe's references, and the place of versions in the workers' memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import RunSettings
from policyline.ledger.probe import PROBE_TOKENS
from policyline.publisher import Publisher
from tests.engines import LONG, PROMPT, until, zero_b
from tests.integration.watcher.site import CountingClient, Site


async def publish(site: Site, metadata: dict[str, Any]) -> None:
    """Publish an adapter that changes nothing."""

    def work() -> None:
        adapter = zero_b(site.root / "adapters" / "zero")
        with Publisher(site.ledger, site.storage, run="run", settings=site.run) as publisher:
            publisher.publish(adapter, metadata=metadata)

    await asyncio.to_thread(work)


class TestReferences:
    async def test_an_adapter_without_effect_is_warned_about_and_served(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await publish(site, {"zero_init": False})
            await site.until_acked(1)
            await running.until_status('"notes":{"1":["inconclusive')
            metrics = (await running.get("/metrics")).text

        (acked,) = site.events("version_acked")
        assert acked.data["notes"][0].startswith("inconclusive")
        assert "policyline_suspicious_probes_total 1.0" in metrics

    @pytest.mark.parametrize("metadata", [{}, {"zero_init": True}])
    async def test_one_that_shall_have_none_is_not(
        self, site: Site, double: SimulatedServer, metadata: dict[str, Any]
    ) -> None:
        """Its bytes say so: every B is zero."""
        async with site.sidecar(double):
            await publish(site, metadata)
            await site.until_acked(1)

        assert "notes" not in site.events("version_acked")[0].data

    async def test_the_base_is_not_asked_next_to_loaded_adapters(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as first:
            await site.publish_and_wait(1)
            await first.kill()
        async with site.sidecar(double):
            await publish(site, {})
            await site.until_acked(2)

        assert "notes" not in site.events("version_acked")[-1].data

    async def test_the_trainers_own_values_are_compared(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with CountingClient(double.url) as trainer:
            right = list(await trainer.score("tiny", PROBE_TOKENS))
        wrong = [value - 1 for value in right]
        async with site.sidecar(double):
            await publish(site, {"zero_init": True, "probe_reference": right})
            await site.until_acked(1)
            await publish(site, {"zero_init": True, "probe_reference": wrong})
            await site.until_acked(2)

        agreed, warned = site.events("version_acked")
        assert "notes" not in agreed.data
        assert "differs from the trainer's reference by 1 on average" in warned.data["notes"][0]


def resident(engine: SimulatedServer) -> set[int]:
    return set(engine.service.engine.worker.resident_ids)


def registered(engine: SimulatedServer) -> set[int]:
    return {adapter.id for adapter in engine.service.registry.values()}


class TestResidents:
    async def test_what_is_evicted_leaves_the_workers(
        self, site: Site, double: SimulatedServer
    ) -> None:
        site.run = RunSettings(max_staleness=0)
        async with site.sidecar(double, grace_s=100.0) as running:
            await site.publish_and_wait(1, 2, 3)
            await site.until(lambda _: site.reported(2) == "evicted")

            async def only_the_registered_are_left() -> bool:
                return resident(double) == registered(double) and len(resident(double)) == 1

            await until(only_the_registered_are_left)
            assert "policyline_freed_total 2.0" in (await running.get("/metrics")).text

    async def test_it_stays_while_a_request_is_on_it(self, site: Site) -> None:
        site.run = RunSettings(max_staleness=0)
        options = ServiceOptions(step_delay_s=0.01, engine=EngineOptions(max_model_len=512))
        async with SimulatedServer(options) as engine, site.sidecar(engine):
            await site.publish_and_wait(1)
            pending = engine.service.registry["trl-policy-v1"].id
            async with CountingClient(engine.url) as client:
                asked = client.complete("trl-policy-v1", PROMPT, **LONG | {"max_tokens": 300})
                long = asyncio.create_task(asked)
                await site.publish_and_wait(2)
                await site.until(lambda _: site.reported(1) == "evicted")
                looks = engine.requests["/metrics"]

                async def looked_again() -> bool:
                    return engine.requests["/metrics"] > looks + 3

                await until(looked_again)
                assert pending in resident(engine)
                assert not long.done()
                await long

            async def is_freed() -> bool:
                return pending not in resident(engine)

            await until(is_freed)

    async def test_it_works_without_development_routes(self, site: Site) -> None:
        site.run = RunSettings(max_staleness=0)
        async with (
            SimulatedServer(ServiceOptions(dev_mode=False)) as engine,
            site.sidecar(engine),
        ):
            await site.publish_and_wait(1, 2)
            await site.until(lambda _: site.reported(1) == "evicted")
            assert engine.requests["/collective_rpc"] <= 1
