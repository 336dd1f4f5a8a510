"""Versions come and go: fetch, load, ack, window, eviction."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import RunSettings
from policyline.watcher.settings import EngineTimeouts
from tests.engines import until
from tests.integration.watcher.site import Site, names


def listed(engine: SimulatedServer) -> set[str]:
    return set(engine.service.registry)


async def test_a_published_version_is_acked_with_what_was_seen(
    site: Site, double: SimulatedServer
) -> None:
    async with site.sidecar(double):
        await site.publish(1)
        view = await site.until_acked(1)

    (row,) = site.ledger.residency("trl-policy")
    path = Path(double.service.registry["trl-policy-v1"].path)
    assert view.current == 1
    assert row.incarnation == view.replicas["r0"].incarnation
    assert len(json.loads(row.probe)) == 15
    assert path.is_absolute()
    assert path.name == f"trl-policy-v1-{row.digest[:16]}"
    assert path.parent.name == site.ledger.ledger_id
    recorded = {p.phase: p.duration_s for p in site.ledger.phases() if p.source == "r0"}
    assert recorded.keys() == {"notice", "fetch", "verify", "load", "probe"}
    assert all(0 <= seconds < 10 for seconds in recorded.values())
    assert len(site.events("version_fetched")) == 1


async def test_a_new_version_costs_the_engine_few_requests(
    site: Site, double: SimulatedServer
) -> None:
    """One load, one probe with the list next to it and the incarnation after it; and observations
    before the load, after it, and when the version becomes current."""
    async with site.sidecar(double, poll_interval_s=1000.0, linger_s=1000.0) as running:
        await site.publish_and_wait(1)
        await running.until_status('"trl-policy-v1":"/')
        before = Counter(double.requests)

        await site.publish_and_wait(2, 3)

        await running.until_status('"trl-policy-v3":"/')
        assert (await running.get("/status")).json()["plan"] == []
        asked = Counter(double.requests) - before
        assert asked["/v1/load_lora_adapter"] == asked["/v1/completions"] == 2
        assert 4 <= asked["/v1/models"] <= 2 * (1 + 3)
        assert 4 <= asked["/metrics"] <= 2 * (1 + 3)


async def test_the_grace_counts_from_the_first_ack(postgres_site: Site) -> None:
    """Of its own ack no signal comes to a sidecar on Postgres."""
    site = postgres_site
    site.run = RunSettings(min_ready=1, ready_grace_s=0.3)
    async with (
        SimulatedServer() as quick,
        SimulatedServer() as stuck,
        site.sidecar(quick, poll_interval_s=1000.0) as running,
        site.sidecar(stuck, "r1", poll_interval_s=1000.0, timeouts=EngineTimeouts()),
    ):
        await site.publish_and_wait(1)
        await site.until_acked(1, "r0", "r1")
        await running.until_status('"role":"current"')
        stuck.script(Fault("load", "hang", times=ALWAYS))

        await site.publish(2)

        await site.until(lambda view: view.current == 2)
        assert site.ledger.view("trl-policy").acked_by(2) == ("r0",)


async def test_a_version_that_was_published_before_the_start_is_served(
    site: Site, double: SimulatedServer
) -> None:
    await site.publish(1)

    async with site.sidecar(double):
        await site.until_acked(1)


async def test_the_window_stays_and_what_is_out_of_it_goes(site: Site) -> None:
    site.run = RunSettings(max_staleness=2)
    options = ServiceOptions(engine=EngineOptions(max_loras=4))
    async with SimulatedServer(options) as engine, site.sidecar(engine) as running:
        await site.publish_and_wait(*range(1, 8))
        await site.until(
            lambda _: site.reported(4) == "evicted" and site.copies() == names(5, 6, 7)
        )

        assert listed(engine) == names(5, 6, 7)
        assert {site.reported(v) for v in range(1, 5)} == {"evicted"}
        assert sorted(running.client.loads) == sorted(names(*range(1, 8)))


async def test_a_slot_is_freed_for_a_new_version_before_the_linger_is_over(site: Site) -> None:
    site.run = RunSettings(max_staleness=0)
    options = ServiceOptions(engine=EngineOptions(max_loras=2))
    async with SimulatedServer(options) as engine, site.sidecar(engine, linger_s=1000.0):
        await site.publish_and_wait(1, 2)
        assert listed(engine) == names(1, 2)

        await site.publish_and_wait(3)

        assert listed(engine) == names(2, 3)


async def test_a_pinned_version_stays(site: Site, double: SimulatedServer) -> None:
    site.run = RunSettings(max_staleness=0)
    async with site.sidecar(double):
        await site.publish_and_wait(1)
        site.ledger.pin("trl-policy", 1, serve=True)
        await site.publish_and_wait(2, 3)
        await site.until(lambda _: site.reported(2) == "evicted" and listed(double) == names(1, 3))


async def test_a_withdrawn_version_goes(site: Site, double: SimulatedServer) -> None:
    async with site.sidecar(double):
        await site.publish_and_wait(1, 2)

        site.ledger.withdraw("trl-policy", 1, "worse")

        await site.until(lambda _: site.reported(1) == "evicted" and listed(double) == names(2))


async def test_replicas_of_one_build_compare_their_probes(site: Site) -> None:
    async with SimulatedServer() as first, SimulatedServer() as second, site.sidecar(first):
        await site.publish_and_wait(1)
        second.script(Fault("completions", "as_base", times=ALWAYS))
        async with site.sidecar(second, "r1"):
            (mismatch,) = await site.until_event("probe_mismatch")
            assert (mismatch.replica, mismatch.data["reference"]) == ("r1", "r0")
            assert site.ledger.view("trl-policy").acked_by(1) == ("r0",)

            second.clear_faults()

            await site.until_acked(1, "r0", "r1")
    assert len(site.events("probe_mismatch")) == 1


async def test_files_stay_while_the_engine_is_paused(site: Site, double: SimulatedServer) -> None:
    """It shows no request then, and may hold one."""
    site.run = RunSettings(max_staleness=0)
    async with site.sidecar(double, grace_s=0.5) as running:
        await site.publish_and_wait(1, 2)
        site.ledger.pause("trl-policy", "maintenance")
        await running.until_status('"paused":true')
        looks = double.requests["/metrics"]

        async def looked_for_longer_than_the_grace() -> bool:
            return double.requests["/metrics"] > looks + 6

        await until(looked_for_longer_than_the_grace)
        assert site.copies() == names(1, 2)

        site.ledger.resume("trl-policy")
        await site.until(lambda _: site.copies() == names(2))


async def test_the_status_server_tells(site: Site, double: SimulatedServer) -> None:
    async with site.sidecar(double) as running:
        await site.publish_and_wait(1)
        await running.until_status('"ready":true')

        status = (await running.get("/status")).json()
        metrics = (await running.get("/metrics")).text
        assert (await running.get("/healthz")).status_code == 200
        assert (await running.get("/readyz")).status_code == 200

    assert (status["replica"], status["generation"]) == ("r0", 1)
    assert [v["name"] for v in status["desired"]["versions"]] == ["trl-policy-v1"]
    assert "policyline_acks_total 1.0" in metrics
    assert 'policyline_phase_seconds_count{phase="load"} 1.0' in metrics


async def test_a_late_joiner_loads_current_first_then_the_window_from_new_to_old(
    site: Site, double: SimulatedServer
) -> None:
    async with site.sidecar(double), SimulatedServer() as other:
        await site.publish_and_wait(1, 2, 3, 4)

        async with site.sidecar(other, "r1") as late:
            await site.until(lambda v: all("r1" in v.acked_by(n) for n in range(1, 5)))

            assert late.client.loads == [f"trl-policy-v{n}" for n in (4, 3, 2, 1)]


async def test_what_was_published_while_nobody_served_is_skipped_but_the_newest(
    site: Site, double: SimulatedServer
) -> None:
    await site.publish(*range(1, 13))

    async with site.sidecar(double) as running:
        await site.until(lambda v: v.current == 12)

        assert running.client.loads == ["trl-policy-v1", "trl-policy-v12"]
    states = {v.version: v.state for v in site.ledger.versions(line="trl-policy")}
    assert {states[n] for n in range(2, 12)} == {"skipped"}


DOCUMENTED = Path("docs/metrics.md").read_text()


async def test_everything_can_be_scraped(site: Site, double: SimulatedServer) -> None:
    """Each metric of docs/metrics.md is there, and says what happened."""
    documented = re.findall(r"`(policyline_(?!router_)\w+)", DOCUMENTED)
    site.run = RunSettings(max_staleness=0)
    async with site.sidecar(double) as running:
        await site.publish_and_wait(1, 2)
        await site.until(lambda _: site.reported(1) == "evicted")
        double.script(Fault("load", "fail", times=ALWAYS, message="out of luck"))
        await site.publish(3)
        status: dict[str, Any] = {"pending": []}
        metrics = ""
        # while an attempt is in hand nothing is pending: both are asked between two attempts
        while not (status["pending"] and 'pending_versions{reason="back_off"} 1.0' in metrics):
            metrics = (await running.get("/metrics")).text
            status = (await running.get("/status")).json()

    assert set(documented) >= {"policyline_pending_versions", "policyline_syncs_since_ack"}
    assert [name for name in documented if f"\n{name}" not in metrics] == []
    for line in (
        "policyline_resident_versions 1.0",
        "policyline_acked_versions 1.0",
        "policyline_acks_total 2.0",
        "policyline_evictions_total 1.0",
        "policyline_lag_versions 0.0",
        "policyline_syncs_since_ack 1.0",
        'policyline_pending_versions{reason="back_off"} 1.0',
        'policyline_phase_seconds_count{phase="probe"} 2.0',
        "policyline_engine_up 1.0",
        "policyline_engine_hung 0.0",
    ):
        assert line in metrics
    assert re.search(r'policyline_errors_total\{error="EngineFault"\} [1-9]', metrics)
    assert "out of luck" in status["pending"][0]["why"]
    assert status["next_wake_s"] <= 0.2


def test_no_wall_clock_is_read() -> None:
    """A stepped clock changes nothing: durations are of the loop's monotonic clock."""
    for module in Path("watcher").glob("*.py"):
        assert not re.search(r"time\.time\b|time\.time_ns|datetime", module.read_text()), module
