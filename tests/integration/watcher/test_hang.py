"""Engines that look alive and do not generate, and dead ones behind a living process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.watcher.settings import EngineTimeouts
from tests.engines import LONG, PROMPT, until
from tests.integration.watcher.site import CountingClient, Running, Site

SOON: dict[str, Any] = {"probe_interval_s": 0.2, "probe_timeout_s": 0.3}


async def asked(running: Running, count: int) -> bool:
    """Whether the engine was asked for so many scores."""
    return len(running.client.scores) >= count


class TestHungWorker:
    async def test_its_acks_are_void_until_it_answers_again_and_nothing_is_reloaded(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double, **SOON) as running:
            await site.publish_and_wait(1)
            before = site.ledger.view("trl-policy").replicas["r0"].incarnation

            double.script(Fault("completions", "hang", times=ALWAYS))

            view = await site.until(lambda v: v.replicas["r0"].incarnation is None)
            assert view.acked_by(1) == ()
            assert view.replicas["r0"].state == "joined"
            await running.until_status('"why_not_ready":"engine hangs')
            assert (await running.get("/readyz")).status_code == 503
            assert "policyline_engine_hung 1.0" in (await running.get("/metrics")).text
            (told,) = [
                e for e in site.events("incarnation_changed") if e.data["incarnation"] is None
            ]
            assert "no answer to a scored request" in told.data["reason"]

            double.clear_faults()

            view = await site.until_acked(1)
            assert view.replicas["r0"].incarnation == before
            assert running.client.loads == ["trl-policy-v1"]
            assert len(site.events("version_acked")) == 1

    async def test_it_is_asked_at_once_after_a_call_that_timed_out(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double, probe_timeout_s=0.3) as running:
            await site.publish_and_wait(1)

            double.script(Fault("is_paused", "hang"))
            double.script(Fault("completions", "hang", times=ALWAYS))

            await site.until(lambda v: v.replicas["r0"].incarnation is None)
            double.clear_faults()
            await site.until_acked(1)
            assert running.client.loads == ["trl-policy-v1"]

    async def test_a_sidecar_does_not_join_for_it(
        self, site: Site, double: SimulatedServer
    ) -> None:
        double.script(Fault("completions", "hang"))
        async with site.sidecar(double, joins=False) as running:
            await running.until_status("EngineTimeout")
            assert site.ledger.replicas("trl-policy") == []

            await site.until(lambda v: "r0" in v.replicas)

    async def test_a_busy_engine_is_no_hung_one(self, site: Site) -> None:
        """Its only place is taken for long, so the scored request waits; but it does steps."""
        only_place = EngineOptions(max_num_seqs=1)
        options = ServiceOptions(engine=only_place, step_delay_s=0.01)
        async with SimulatedServer(options) as engine, site.sidecar(engine, **SOON) as running:
            await site.publish_and_wait(1)
            async with CountingClient(engine.url) as client:
                decoding = client.complete("trl-policy-v1", PROMPT, **LONG | {"max_tokens": 200})
                long = asyncio.create_task(decoding)
                waited = len(running.client.scores) + 4
                await until(lambda: asked(running, waited))
                assert not long.done()
                await long

            assert site.ledger.view("trl-policy").acked_by(1) == ("r0",)
            assert not [
                e for e in site.events("incarnation_changed") if e.data["incarnation"] is None
            ]


class TestHangDuringALoad:
    @pytest.mark.parametrize("silent", [False, True], ids=["server answers", "server is silent"])
    @pytest.mark.parametrize("call", ["load", "completions"])
    async def test_the_acks_are_void_long_before_the_call_is_given_up(
        self, site: Site, double: SimulatedServer, call: str, silent: bool
    ) -> None:
        patient = EngineTimeouts(observe_s=0.2, load_s=600.0, score_s=600.0)
        async with site.sidecar(double, timeouts=patient, probe_timeout_s=0.5) as running:
            await site.publish_and_wait(1)
            before = site.ledger.view("trl-policy").replicas["r0"].incarnation
            double.script(Fault(call, "hang", times=ALWAYS))
            if silent:
                double.script(Fault("metrics", "hang", times=ALWAYS))
            await site.publish(2)

            await site.until(lambda v: v.replicas["r0"].incarnation is None)

            double.clear_faults()
            view = await site.until_acked(2)
            assert view.replicas["r0"].incarnation == before
            assert view.acked_by(1) == ("r0",)
            assert running.client.loads.count("trl-policy-v1") == 1


class TestSilentServer:
    @pytest.mark.parametrize("call", ["metrics", "models"])
    async def test_acks_are_void_once_it_was_silent_for_long(
        self, site: Site, double: SimulatedServer, call: str
    ) -> None:
        timeouts = EngineTimeouts(observe_s=0.2)
        async with site.sidecar(double, timeouts=timeouts, probe_timeout_s=0.5) as running:
            await site.publish_and_wait(1)
            double.script(Fault(call, "hang", times=ALWAYS))

            await site.until(lambda v: v.replicas["r0"].incarnation is None)
            assert running.client.unloads == []

            double.clear_faults()
            await site.until_acked(1)
            assert running.client.loads == ["trl-policy-v1"]


class TestDeadEngineBehindALivingProcess:
    async def test_a_load_that_it_will_never_answer_is_given_up_at_once(
        self, site: Site, double: SimulatedServer
    ) -> None:
        patient = EngineTimeouts(connect_s=1.0, load_s=600.0, score_s=600.0)
        async with site.sidecar(double, timeouts=patient):
            await site.publish_and_wait(1)
            double.script(Fault("load", "die"))
            begun = time.monotonic()
            await site.publish(2)

            view = await site.until(lambda v: v.replicas["r0"].incarnation is None)

            assert time.monotonic() - begun < 15.0
            assert view.acked_by(1) == ()
            await double.restart()
            await site.until_acked(2)
            await site.until_acked(1)
