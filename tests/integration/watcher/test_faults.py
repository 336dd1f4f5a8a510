"""Engine, storage and versions misbehave; what is good goes on being served."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import RunSettings
from policyline.watcher.errors import LedgerReplaced
from tests.engines import until
from tests.integration.watcher.site import Site, names


def corrupt(site: Site, version: int) -> None:
    """Change one byte of a published version, and neither size nor name."""
    weights = site.root / "storage" / f"trl-policy-v{version}" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0xFF
    weights.write_bytes(content)


class TestEngine:
    async def test_a_restarted_engine_is_served_again(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1, 2)
            before = site.ledger.view("trl-policy").replicas["r0"].incarnation

            await double.restart()

            view = await site.until(
                lambda v: (
                    v.replicas["r0"].incarnation not in {before, None}
                    and v.acked_by(1) == v.acked_by(2) == ("r0",)
                )
            )
            assert view.replicas["r0"].generation == 1
            assert running.client.loads[2] == "trl-policy-v2"  # current first

    async def test_acks_are_void_while_the_engine_is_gone(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double):
            await site.publish_and_wait(1)

            await double.kill()
            view = await site.until(lambda v: v.replicas["r0"].incarnation is None)
            assert view.acked_by(1) == ()
            assert view.current == 1

            await double.restart()
            await site.until_acked(1)

    async def test_a_reply_that_got_lost_costs_no_second_load(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            double.script(Fault("load", "lose_reply"))
            await site.publish(1)
            await site.until_acked(1)

            assert running.client.loads == ["trl-policy-v1"]

    async def test_a_load_that_fails_once_is_tried_again_and_logged_once(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double):
            double.script(Fault("load", "fail", times=3, message="out of luck"))
            await site.publish(1)
            await site.until_acked(1)

        (failed,) = site.events("version_load_failed")
        assert not failed.data["permanent"]
        assert "out of luck" in failed.data["reason"]

    async def test_a_version_during_which_the_engine_died_twice_is_quarantined(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            double.script(Fault("completions", "die", times=2))
            await site.publish(1)
            for _ in range(2):
                await double.closed.wait()
                await double.restart()
            await site.until(lambda _: site.reported(1) == "rejected")
            await site.publish_and_wait(2)

            assert running.client.loads == ["trl-policy-v1", "trl-policy-v1", "trl-policy-v2"]
        last = site.events("version_load_failed")[-1]
        assert last.data["permanent"]
        assert "died 2 times" in last.data["reason"]


class TestUnknown:
    @pytest.mark.parametrize("call", ["metrics", "models"])
    async def test_a_failed_look_unloads_and_deletes_nothing(
        self, site: Site, double: SimulatedServer, call: str
    ) -> None:
        site.run = RunSettings(max_staleness=0)
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            site.ledger.pin("trl-policy", 1, serve=True)
            await site.publish_and_wait(2)
            double.script(Fault(call, "fail", times=ALWAYS))
            await running.until_status('"unknown"')
            site.ledger.unpin("trl-policy", 1)
            await site.publish(3)
            await running.until_status('"role":"out_of_window"')
            assert running.client.unloads == []
            assert site.copies() >= names(1, 2)

            double.clear_faults()
            await site.until_acked(3)
            await site.until(lambda _: site.reported(1) == site.reported(2) == "evicted")


class TestVersions:
    async def test_corrupted_bytes_are_rejected_and_the_next_version_is_served(
        self, site: Site, double: SimulatedServer
    ) -> None:
        await site.publish(1)
        corrupt(site, 1)

        async with site.sidecar(double) as running:
            (rejected,) = await site.until_event("version_load_failed")
            await site.publish(2)
            view = await site.until_acked(2)

            assert rejected.data["permanent"]
            assert "sha256" in rejected.data["reason"]
            assert view.current == 2
            assert running.client.loads == ["trl-policy-v2"]
        assert len(site.events("version_load_failed")) == 1

    async def test_not_a_number_is_rejected_and_leaves_the_engine(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double):
            double.script(Fault("completions", "nan"))
            await site.publish(1)
            await site.until(
                lambda _: site.reported(1) == "rejected" and not double.service.registry
            )
            await site.publish_and_wait(2)

            assert set(double.service.registry) == names(2)

    @pytest.mark.parametrize(
        "fault", [Fault("completions", "nan"), Fault("completions", "die", times=2)], ids=str
    )
    async def test_a_rejected_version_is_served_once_the_operator_says_so(
        self, site: Site, double: SimulatedServer, fault: Fault
    ) -> None:
        """Rejected for its answers, or quarantined for two deaths; the cause is gone since."""
        site.run = RunSettings(ready_grace_s=0.05)
        async with (
            SimulatedServer(double.options) as other,
            site.sidecar(double) as running,
            site.sidecar(other, "r1"),
        ):
            double.script(fault)
            await site.publish(1)
            for _ in range(fault.times if fault.kind == "die" else 0):
                await double.closed.wait()
                await double.restart()
            await site.until(lambda view: site.reported(1) == "rejected" and view.current == 1)
            failures = len(site.events("version_load_failed"))
            assert site.ledger.retry("trl-policy", 1, replica="r1") == ()
            assert site.ledger.retry("trl-policy", 1) == ("r0",)
            await site.until_acked(1, "r0", "r1")

            await site.publish_and_wait(2)
            assert running.client.loads[-2:] == ["trl-policy-v1", "trl-policy-v2"]
        assert len(site.events("version_load_failed")) == failures
        assert [e.replica for e in site.events("version_retried")] == ["r0"]

    async def test_storage_that_is_away_is_waited_for_and_logged_once(
        self, site: Site, double: SimulatedServer
    ) -> None:
        await site.publish(1)
        away = site.storage.root.rename(site.root / "away")
        async with site.sidecar(double) as running:
            await running.until_attempts("trl-policy-v1", 3)
            away.rename(site.storage.root)
            await site.until_acked(1)

        (failed,) = site.events("version_load_failed")
        assert "StorageUnavailable" in failed.data["reason"]

    async def test_files_that_vanish_under_a_served_version_come_back_and_the_ack_stays(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            acked = site.events("version_acked")
            copy = Path(double.service.registry["trl-policy-v1"].path)

            shutil.rmtree(copy)

            await site.until(lambda _: (copy / "adapter_model.safetensors").exists())
            assert site.events("version_acked", "version_fetched")[1:] == acked
            assert running.client.loads == ["trl-policy-v1"]

    async def test_files_that_cannot_be_restored_cost_a_served_version_nothing(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            site.storage.root.rename(site.root / "away")

            shutil.rmtree(double.service.registry["trl-policy-v1"].path)

            await running.until_attempts("trl-policy-v1", 2)
            assert site.ledger.view("trl-policy").acked_by(1) == ("r0",)
            assert site.events("version_load_failed") == []

    async def test_a_damaged_copy_is_repaired_before_it_is_loaded(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double):
            await site.publish_and_wait(1)
        weights = Path(double.service.registry["trl-policy-v1"].path) / "adapter_config.json"
        weights.write_text("{}")
        await double.restart()

        async with site.sidecar(double):
            await site.until_acked(1)

        assert weights.read_text() != "{}"


class TestLedger:
    async def test_a_ledger_that_is_locked_for_a_while_delays_and_harms_nothing(
        self, impatient_site: Site, double: SimulatedServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        site = impatient_site
        caplog.set_level("INFO", "policyline.watcher")

        async def noticed() -> bool:
            return "ledger_write_failed" in events_of(caplog)

        async def recovered() -> bool:
            return "ledger_write_recovered" in events_of(caplog)

        async with site.sidecar(double) as running:
            await site.publish_and_wait(1, 2)
            before = site.ledger.view("trl-policy").replicas["r0"].incarnation
            with closing(sqlite3.connect(site.root / "ledger.db", isolation_level=None)) as holder:
                holder.execute("BEGIN IMMEDIATE")
                await double.restart()
                await until(noticed)
                holder.execute("ROLLBACK")
            await site.until(
                lambda v: (
                    v.replicas["r0"].incarnation != before
                    and v.acked_by(1) == v.acked_by(2) == ("r0",)
                )
            )
            await until(recovered)  # it is noted after the acks, at the end of the pass

            assert running.client.unloads == []
        assert events_of(caplog).count("ledger_write_failed") == 1
        assert events_of(caplog).count("ledger_write_recovered") == 1

    async def test_another_ledger_behind_the_url_ends_the_sidecar_and_harms_nothing(
        self, site: Site, double: SimulatedServer
    ) -> None:
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            with closing(sqlite3.connect(site.root / "ledger.db")) as database, database:
                database.execute("UPDATE head SET ledger_id = 'another'")

            with pytest.raises(LedgerReplaced, match="nothing was unloaded"):
                await running.task

            assert running.client.unloads == []
            assert site.copies() == names(1)

    async def test_a_run_that_needs_more_slots_than_there_are_is_logged_once(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        site.run = RunSettings(max_staleness=4)
        options = ServiceOptions(engine=EngineOptions(max_loras=2))
        async with SimulatedServer(options) as engine, site.sidecar(engine):
            await site.publish_and_wait(1, 2, 3)

        assert events_of(caplog).count("slots_short") == 1


def events_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The event names in the log."""
    return [getattr(record, "event", "") for record in caplog.records]
