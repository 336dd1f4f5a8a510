"""One version, step by step: an ack is written only for what was seen (I4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from policyline.engines.simulated.faults import Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import Ledger
from policyline.ledger.errors import ManifestInvalid
from policyline.watcher.cache import Cache
from policyline.watcher.core.model import (
    Applied,
    DeleteLocal,
    Desired,
    Known,
    Retry,
    Unload,
    Version,
)
from policyline.watcher.execute import Executor
from policyline.watcher.load_version import VersionLoader
from policyline.watcher.membership import ReplicaMembership
from policyline.watcher.metrics import SidecarMetrics
from policyline.watcher.observe import Observer
from policyline.watcher.settings import SidecarSettings
from policyline.watcher.status import SidecarStatus
from policyline.watcher.vllm.worker_slots import WorkerSlots
from tests.engines import until
from tests.integration.watcher.site import CountingClient, Site

LINE = "trl-policy"


@dataclass
class Bench:
    """A watcher taken apart: version 1 is published and nothing is fetched."""

    ledger: Ledger
    client: CountingClient
    server: VersionLoader
    executor: Executor
    cache: Cache
    target: Version
    observed: Known

    @property
    def path(self) -> str:
        return self.observed.path(self.target)

    @property
    def acks(self) -> list[str]:
        return list(self.ledger.view(LINE).acked_by(1))


@pytest.fixture
async def bench(site: Site, double: SimulatedServer) -> AsyncIterator[Bench]:
    await site.publish(1)
    settings = SidecarSettings(replica="r0", cache=site.root / "cache", max_size_bytes=100_000)
    cache, metrics = Cache(settings.cache, site.ledger.ledger_id), SidecarMetrics()
    cache.open()
    async with CountingClient(double.url) as client:
        membership = ReplicaMembership(site.ledger, client, line=LINE, replica="r0")
        await membership.meet_engine()
        await membership.join(await client.incarnation())
        worker_slots = WorkerSlots(client)
        observation = await Observer(
            site.ledger, client, cache, worker_slots, line=LINE, replica="r0"
        ).observe()
        assert isinstance(observation.desired, Desired)
        assert isinstance(observation.observed, Known)
        server = VersionLoader(
            settings,
            membership=membership,
            ledger=site.ledger,
            storage=site.storage,
            engine=client,
            cache=cache,
            worker_slots=worker_slots,
            status=SidecarStatus(LINE, "r0"),
            metrics=metrics,
        )
        executor = Executor(
            server,
            membership=membership,
            ledger=site.ledger,
            engine=client,
            cache=cache,
            worker_slots=worker_slots,
            metrics=metrics,
        )
        target = observation.desired.wanted[0]
        yield Bench(site.ledger, client, server, executor, cache, target, observation.observed)
    cache.close()


async def test_fetch_load_and_ack(bench: Bench) -> None:
    assert await bench.server.fetch(bench.target) == Applied()
    assert bench.acks == []

    assert await bench.server.load(bench.target, bench.observed) == Applied()

    assert bench.acks == ["r0"]


async def test_already_loaded_from_our_path_is_acked(bench: Bench) -> None:
    await bench.server.fetch(bench.target)
    await bench.client.load(bench.target.name, bench.path)

    assert await bench.server.load(bench.target, bench.observed) == Applied()
    assert bench.acks == ["r0"]


async def test_already_loaded_from_another_path_is_not(bench: Bench, tmp_path: Path) -> None:
    await bench.server.fetch(bench.target)
    await bench.client.load(bench.target.name, str(tmp_path / "adapters" / "1"))

    outcome = await bench.server.load(bench.target, bench.observed)

    assert outcome == Retry("the engine does not list it with our path")
    assert bench.acks == []


async def test_a_load_that_lands_after_our_patience_is_settled_by_the_list(
    bench: Bench, double: SimulatedServer
) -> None:
    await bench.server.fetch(bench.target)
    double.script(Fault("load", "hang"))

    outcome = await bench.server.load(bench.target, bench.observed)

    assert outcome == Retry("the engine does not list it with our path", broke=True)
    assert bench.acks == []


async def test_no_ack_if_the_engine_became_another_incarnation(bench: Bench) -> None:
    await bench.server.fetch(bench.target)

    outcome = await bench.server.load(bench.target, replace(bench.observed, incarnation="1.5"))

    assert outcome == Retry("the engine became another incarnation meanwhile", broke=True)
    assert bench.acks == []


async def test_no_ack_without_the_published_bytes_on_this_disk(bench: Bench) -> None:
    await bench.server.fetch(bench.target)
    await bench.client.load(bench.target.name, bench.path)
    (Path(bench.path) / "adapter_config.json").write_text("{}")

    outcome = await bench.server.ack(bench.target, bench.observed)

    assert outcome == Retry("the local copy was damaged")
    assert bench.acks == []


async def test_what_is_loaded_already_is_acked_without_a_load(bench: Bench) -> None:
    await bench.server.fetch(bench.target)
    await bench.client.load(bench.target.name, bench.path)
    bench.client.loads.clear()

    assert await bench.server.ack(bench.target, bench.observed) == Applied()

    assert bench.client.loads == []
    assert bench.acks == ["r0"]


async def test_a_copy_that_was_begun_early_counts_as_fetched(bench: Bench) -> None:
    bench.server.prefetch(bench.target)
    assert await bench.server.fetch(bench.target) == Applied()
    assert await bench.server.load(bench.target, bench.observed) == Applied()

    kinds = [e.kind for e in bench.ledger.events() if e.version == 1]
    assert kinds[-3:] == ["version_fetched", "version_acked", "current_advanced"]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("version", 2, "speaks of trl-policy-v2"),
        ("line", "other", "speaks of other-v1"),
        ("files", [{"path": "../x.json", "size_bytes": 1, "sha256": "0" * 64}], "plain relative"),
    ],
)
async def test_a_manifest_is_not_believed(
    bench: Bench, field: str, value: object, text: str
) -> None:
    forged = json.dumps({**json.loads(bench.target.manifest), field: value})

    with pytest.raises(ManifestInvalid, match=text):
        await bench.server.fetch(replace(bench.target, manifest=forged))

    assert bench.cache.local() == frozenset()


async def test_a_version_that_claims_more_than_allowed_is_refused(bench: Bench) -> None:
    manifest = json.loads(bench.target.manifest)
    assert sum(f["size_bytes"] for f in manifest["files"]) < 100_000
    settings = replace(bench.server._settings, max_size_bytes=10)
    bench.server._settings = settings

    with pytest.raises(ManifestInvalid, match="allowed are 10"):
        await bench.server.fetch(bench.target)


async def test_files_stay_while_a_request_on_the_unloaded_version_runs(
    bench: Bench, double: SimulatedServer
) -> None:
    await bench.server.fetch(bench.target)
    await bench.server.load(bench.target, bench.observed)
    await bench.client.pause("keep")
    request = asyncio.create_task(bench.client.complete(bench.target.name, [5, 6, 7], 200))
    await until(lambda: queued(double))
    await bench.executor.apply(Unload(bench.target, "evicted"), bench.observed)
    double.service.options = replace(double.service.options, step_delay_s=0.005)
    await bench.client.resume()

    outcome = await bench.executor.apply(DeleteLocal((bench.target,), "evicted"), bench.observed)

    assert outcome == Retry("the engine may still need the files")
    assert bench.cache.local() == {bench.target.copy_name}
    await request
    outcome = await bench.executor.apply(DeleteLocal((bench.target,), "evicted"), bench.observed)
    assert outcome == Applied()
    assert bench.cache.local() == frozenset()


async def test_files_of_a_listed_version_stay(bench: Bench) -> None:
    await bench.server.fetch(bench.target)
    await bench.server.load(bench.target, bench.observed)

    outcome = await bench.executor.apply(DeleteLocal((bench.target,), "evicted"), bench.observed)

    assert outcome == Retry("the engine may still need the files")


async def queued(engine: SimulatedServer) -> bool:
    return bool(engine.service.engine.waiting or engine.service.engine.running)
