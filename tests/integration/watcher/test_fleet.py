"""Joining, leaving, getting lost and observing others."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.errors import ListenFailed
from policyline.ledger import EngineFacts, RunSettings
from policyline.watcher.errors import (
    CacheInUse,
    EngineInUse,
    EngineRefusesUs,
    ReplicaInUse,
    ReplicaTakenOver,
    RuntimeLoadingOff,
    SlotsShort,
)
from tests.integration.watcher.site import CountingClient, Site, names

LINE = "trl-policy"


class TestStart:
    async def test_it_waits_for_an_engine_that_is_still_starting(
        self, site: Site, double: SimulatedServer
    ) -> None:
        await double.kill()
        async with site.sidecar(double, joins=False) as running:
            await running.until_status('"why_not_ready":"not joined"')
            assert site.ledger.replicas(LINE) == []

            await double.restart()
            await site.publish(1)
            await site.until_acked(1)

    async def test_it_stops_while_it_waits(self, site: Site, double: SimulatedServer) -> None:
        await double.kill()
        async with site.sidecar(double, joins=False) as running:
            await running.until_status("not joined")
            await running.stop()

        assert site.ledger.replicas(LINE) == []

    async def test_an_engine_without_runtime_loading_is_refused(self, site: Site) -> None:
        async with (
            SimulatedServer(ServiceOptions(runtime_lora=False)) as engine,
            site.sidecar(engine, joins=False) as running,
        ):
            with pytest.raises(RuntimeLoadingOff, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
                await running.task

        assert site.ledger.replicas(LINE) == []

    async def test_an_engine_with_too_few_slots_is_refused(self, site: Site) -> None:
        await site.publish(1)
        options = ServiceOptions(engine=EngineOptions(max_loras=5))
        async with (
            SimulatedServer(options) as engine,
            site.sidecar(engine, joins=False) as running,
        ):
            with pytest.raises(SlotsShort, match=r"--max-loras 5.*max_staleness 4.*--max-loras 6"):
                await running.task

    async def test_a_wrong_key_is_refused_and_not_shown(self, site: Site) -> None:
        async with (
            SimulatedServer(ServiceOptions(api_key="right")) as engine,
            site.sidecar(engine, joins=False, api_key="wr0ng") as running,
        ):
            with pytest.raises(EngineRefusesUs) as refused:
                await running.task

        assert "wr0ng" not in str(refused.value)

    async def test_the_right_key_is_used(self, site: Site) -> None:
        async with (
            SimulatedServer(ServiceOptions(api_key="right")) as engine,
            site.sidecar(engine, api_key="right"),
        ):
            await site.publish(1)
            await site.until_acked(1)

    async def test_a_cache_in_use_and_a_taken_port_are_refused(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            async with site.sidecar(double, joins=False) as second:
                with pytest.raises(CacheInUse):
                    await second.task
            port = running.sidecar.port
            async with site.sidecar(double, "r1", joins=False, listen=f"127.0.0.1:{port}") as third:
                with pytest.raises(ListenFailed, match="--listen"):
                    await third.task


class TestRestart:
    async def test_a_killed_sidecar_rejoins_and_loads_nothing_again(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as first:
            await site.publish_and_wait(1, 2)
            await first.kill()
        acks = len(site.events("version_acked"))

        async with site.sidecar(double) as second:
            await second.until_status('"ready":true')
            await site.publish_and_wait(3)

            assert site.ledger.view(LINE).replicas["r0"].generation == 2
            assert second.client.loads == ["trl-policy-v3"]
        assert len(site.events("version_acked")) == acks + 1

    async def test_what_was_unloaded_meanwhile_is_not_served_before_it_is_acked_again(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as first:
            await site.publish_and_wait(1)
            await first.kill()
        async with CountingClient(double.url) as by_hand:
            await by_hand.unload("trl-policy-v1")

        async with site.sidecar(double):
            await site.until_acked(1)

        kinds = [e.kind for e in site.events("replica_joined", "version_evicted", "version_acked")]
        assert kinds[-3:] == ["replica_joined", "version_evicted", "version_acked"]
        assert site.events("replica_joined")[-1].data["incarnation"] is None

    async def test_acks_of_versions_that_are_nowhere_any_more_are_taken_back(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as first:
            await site.publish_and_wait(1, 2, 3)
            await first.kill()
        for version in (1, 2):
            name = f"trl-policy-v{version}"
            shutil.rmtree(double.service.registry[name].path)
            async with CountingClient(double.url) as by_hand:
                await by_hand.unload(name)
            site.ledger.withdraw(LINE, version, "not needed")

        async with site.sidecar(double):
            await site.until(lambda _: site.reported(1) == site.reported(2) == "evicted")
            await site.until_acked(3)

    async def test_it_leaves_before_it_stops(self, site: Site, double: SimulatedServer) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            await running.stop()

        view = site.ledger.view(LINE)
        assert (view.replicas["r0"].state, view.acked_by(1)) == ("left", ())
        assert set(double.service.registry) == names(1)


class TestForeign:
    async def test_it_blocks_its_version_and_nothing_else(
        self, site: Site, double: SimulatedServer
    ) -> None:
        by_hand = site.root / "adapters" / "99"
        await site.publish(99)
        site.ledger.withdraw(LINE, 1, "only its files are needed")
        async with CountingClient(double.url) as client:
            await client.load("trl-policy-v2", str(by_hand))

        async with site.sidecar(double) as running:
            await site.publish(2)
            await running.until_status("trl-policy-v2 is blocked")
            (foreign,) = site.events("foreign_adapter_seen")
            await site.publish(3)
            site.ledger.withdraw(LINE, 2, "blocked")
            await site.until_acked(3)

            assert (foreign.data["name"], foreign.data["path"]) == ("trl-policy-v2", str(by_hand))
            assert running.client.unloads == []
        assert len(site.events("foreign_adapter_seen")) == 1

    async def test_take_over_replaces_it(self, site: Site, double: SimulatedServer) -> None:
        async with site.sidecar(double) as first:
            await site.publish_and_wait(1)
            await first.stop()
        async with CountingClient(double.url) as client:
            await client.unload("trl-policy-v1")
            await client.load("trl-policy-v1", str(site.root / "adapters" / "1"))

        async with site.sidecar(double, take_over=True) as second:
            view = await site.until_acked(1)
            assert second.client.resets == 1

        place = f"trl-policy-v1-{view.desired[0].digest[:16]}"
        assert double.service.registry["trl-policy-v1"].path.endswith(place)


class TestFencing:
    async def test_a_lost_watcher_rejoins_without_a_load(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double, heartbeat_s=60.0, ttl_s=120.0) as running:
            await site.publish_and_wait(1)
            await site.until(lambda _: site.ledger.heartbeats(LINE)["r0"] == (1, 1))
            assert site.ledger.declare_lost(LINE, "r0", generation=1, counter=1, reason="test")

            view = await site.until(lambda v: v.replicas["r0"].generation == 2)

            await site.until_acked(1)
            assert view.replicas["r0"].state == "joined"
            assert running.client.loads == ["trl-policy-v1"]

    async def test_the_former_of_two_stops_with_the_reason(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            site.ledger.join(LINE, "r0", EngineFacts("1000.5"))

            with pytest.raises(ReplicaTakenOver, match="--replica"):
                await running.task

        assert site.ledger.replicas(LINE)[0].state == "joined"

    async def test_one_that_lives_is_not_pushed_out(
        self, site: Site, double: SimulatedServer
    ) -> None:
        elsewhere = site.root / "elsewhere"
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            async with site.sidecar(double, joins=False, cache=elsewhere) as second:
                with pytest.raises(ReplicaInUse, match=rf":{os.getpid()} since.*--replace"):
                    await second.task

            assert site.ledger.replicas(LINE)[0].generation == 1
            assert site.ledger.view(LINE).acked_by(1) == ("r0",)
            assert not running.task.done()

    async def test_an_engine_has_one_sidecar_whatever_its_name(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            async with site.sidecar(double, "r1", joins=False, replace=True) as second:
                with pytest.raises(EngineInUse, match=r"as replica 'r0' by .*another --vllm"):
                    await second.task
                site.tasks.remove(second.task)

            assert [row.replica for row in site.ledger.replicas(LINE)] == ["r0"]
            assert not running.task.done()
        async with site.sidecar(double, "r1", cache=site.root / "cache" / "r0"):
            await site.until(lambda v: v.acked_by(1) == ("r1",))

    async def test_the_cache_of_one_that_lives_names_its_process(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with (
            site.sidecar(double),
            site.sidecar(double, joins=False, replace=True) as second,
        ):
            with pytest.raises(CacheInUse, match=rf"process {os.getpid()}; stop that one first"):
                await second.task

    async def test_replace_takes_its_place_and_tells_the_truth(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            path = double.service.registry["trl-policy-v1"].path
            async with site.sidecar(
                double, cache=site.root / "elsewhere", replace=True, take_over=True
            ):
                with pytest.raises(ReplicaTakenOver):
                    await running.task
                site.tasks.remove(running.task)
                await site.until_acked(1)

        (gone,) = site.events("version_evicted")
        assert gone.data["reason"] == (
            f"the engine serves it from {path!r}, which is not this sidecar's copy"
        )

    async def test_one_that_ends_with_an_error_leaves_the_fleet(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            off = "LoRA is not enabled"
            double.script(Fault("load", "fail", times=ALWAYS, status=400, message=off))
            await double.restart()

            with pytest.raises(RuntimeLoadingOff):
                await running.task

        replica = site.ledger.replicas(LINE)[0]
        assert (replica.state, replica.reason[:6]) == ("left", "ended:")


class TestObserver:
    async def test_a_silent_replica_is_declared_lost(
        self, site: Site, double: SimulatedServer
    ) -> None:
        site.ledger.join(LINE, "silent", EngineFacts("1.0"))
        async with site.sidecar(double, heartbeat_s=0.1, ttl_s=0.5):
            view = await site.until(lambda v: v.replicas["silent"].state == "lost")

            assert view.replicas["r0"].state == "joined"

    async def test_a_dead_replica_blocks_the_others_for_the_grace_at_most(
        self, site: Site, double: SimulatedServer
    ) -> None:
        """I9."""
        site.run = RunSettings(ready_grace_s=0.3)
        site.ledger.join(LINE, "dead", EngineFacts("1.0"))
        async with site.sidecar(double):
            await site.publish(1)
            await site.until(lambda v: v.current == 1)

        (advanced,) = site.events("current_advanced")
        assert "1 of 2" in advanced.data["reason"]

    async def test_a_candidate_that_is_not_ready_in_time_is_withdrawn(
        self, site: Site, double: SimulatedServer
    ) -> None:
        site.run = RunSettings(min_ready=None, candidate_timeout_s=0.5)
        site.ledger.join(LINE, "dead", EngineFacts("1.0"))
        async with site.sidecar(double):
            await site.publish(1)
            (withdrawn,) = await site.until_event("version_withdrawn")

        assert "time was up" in withdrawn.data["reason"]


class TestWakes:
    """With a poll so rare that only a wake can be the reason."""

    async def test_a_publication_wakes(self, site: Site, double: SimulatedServer) -> None:
        async with site.sidecar(double, poll_interval_s=1000.0):
            await site.publish_and_wait(1, 2)

    async def test_the_end_of_the_engine_wakes(self, site: Site, double: SimulatedServer) -> None:
        async with site.sidecar(double, poll_interval_s=1000.0) as running:
            await site.publish_and_wait(1)
            await running.until_status('"ready":true')

            await double.kill()

            await site.until(lambda v: v.replicas["r0"].incarnation is None)

    async def test_changes_of_others_cost_the_engine_nothing(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double, poll_interval_s=1000.0) as running:
            await site.publish_and_wait(1)
            await running.until_status('"role":"current"')
            double.script(Fault("metrics", "fail", times=ALWAYS))

            for _ in range(20):
                await asyncio.to_thread(site.ledger.pin, LINE, 1, serve=False)

            assert (await running.get("/readyz")).text == "ok"


async def test_a_hundred_wakes_at_once_are_harmless(site: Site, double: SimulatedServer) -> None:
    async with site.sidecar(double) as running:
        await site.publish_and_wait(1)
        await asyncio.gather(
            *(asyncio.to_thread(site.ledger.signal.after_commit) for _ in range(100))
        )
        await site.publish_and_wait(2)

        assert running.client.loads == ["trl-policy-v1", "trl-policy-v2"]
