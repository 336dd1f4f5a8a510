"""From the call of `publish` to the ack, against the sum of the mandated steps.

One double of vLLM with loads of 5 ms and one sidecar, each a process of its own, on a local disk;
adapters of 5 MB, each acked before the next is published. Between two versions the mandated steps
are timed alone, on the same bytes, disk and machine: their medians, added up, are the floor.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.harness import Bar, Figure, Outcome, log, main, quantile
from benchmarks.steps import OWN, WHOLE, Alone, StepTimes
from policyline.demo import synthetic
from policyline.demo.fleet import sidecar_child
from policyline.demo.settings import DemoSettings
from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.names import DEFAULT_LINE
from policyline.publisher import Publisher
from policyline.storage import open_storage
from policyline.watcher.vllm.client import EngineClient

VERSIONS = 200
QUICK_VERSIONS = 20
WARM_UP = 3
"""Versions before the first that counts: imports, caches and the shape of the adapter."""
ADAPTER_BYTES = 5_000_000
RANK = 8
"""Gives 120 tensors; at rank 1 it would be a thousand, and the double's loads longer than 5 ms."""
LOAD_S = 0.005
ACK_WITHIN_S = 30.0
POLL_S = 0.0005
"""Between two reads of the modification time of the ledger's signal file: a microsecond each."""


@asynccontextmanager
async def _engines(folder: Path) -> AsyncIterator[tuple[SimulatedChild, EngineClient]]:
    """The measured double, and a client of the one for steps alone."""
    options = ServiceOptions(load_delay_s=LOAD_S)
    with (
        SimulatedChild(options, log_path=folder / "engine.log") as measured,
        SimulatedChild(options, log_path=folder / "engine-alone.log") as alone,
    ):
        measured.wait_healthy(30)
        alone.wait_healthy(30)
        async with EngineClient(alone.url) as client:
            yield measured, client


def measure(quick: bool) -> Outcome:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="policyline-bench-") as folder:
        return asyncio.run(_measure(Path(folder), QUICK_VERSIONS if quick else VERSIONS))


async def _measure(folder: Path, versions: int) -> Outcome:
    settings = DemoSettings(workdir=folder / "work", run="bench")
    settings.storage.mkdir(parents=True)
    upgrade_url(str(settings.ledger))
    times = StepTimes()
    whole: list[float] = []
    blocked: list[float] = []
    async with _engines(folder) as (engine, client):
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger(str(settings.ledger)))
            stack.enter_context(sidecar_child(settings, "r0", engine.url))
            alone = Alone(folder, client, times)
            stack.callback(alone.close)
            _await_join(ledger)
            publisher = stack.enter_context(
                Publisher(ledger, open_storage(str(settings.storage)), run=settings.run)
            )
            for number in range(1, WARM_UP + versions + 1):
                adapter = synthetic.write_adapter(
                    folder / "adapter", number, rank=RANK, size_bytes=ADAPTER_BYTES
                )
                publish_s, ack_s = _publish(publisher, ledger, settings, adapter)
                await alone.run(adapter, number)
                if number > WARM_UP:
                    blocked.append(publish_s)
                    whole.append(ack_s)
                if number % 50 == 0:
                    log(f"  {number} versions")
            return _outcome(ledger, settings, times, blocked, whole)


def _publish(
    publisher: Publisher, ledger: Ledger, settings: DemoSettings, adapter: Path
) -> tuple[float, float]:
    """Publish once; return seconds until `publish` returned and until the ack was committed."""
    signal_file = settings.ledger.with_name(f"{settings.ledger.name}.signal")
    begun = time.perf_counter()
    published = publisher.publish(adapter)
    publish_s = time.perf_counter() - begun
    seen = None
    while time.perf_counter() - begun < ACK_WITHIN_S:
        touched = signal_file.stat().st_mtime_ns
        if touched != seen:
            # Taken before the ledger is read, as that time is not the pipeline's.
            now = time.perf_counter() - begun
            seen = touched
            if ledger.view(settings.line).acked_by(published.version):
                return publish_s, now
        time.sleep(POLL_S)
    raise TimeoutError(f"{published.name} was not acked within {ACK_WITHIN_S:g} s")


def _await_join(ledger: Ledger) -> None:
    deadline = time.monotonic() + ACK_WITHIN_S
    while not any(row.state == "joined" for row in ledger.replicas(DEFAULT_LINE)):
        if time.monotonic() > deadline:
            raise TimeoutError("the sidecar did not join")
        time.sleep(0.05)


def _outcome(
    ledger: Ledger,
    settings: DemoSettings,
    times: StepTimes,
    blocked: list[float],
    whole: list[float],
) -> Outcome:
    floor_s = times.total(WHOLE)
    own_s = times.total(OWN)
    steps = [
        Figure(f"step alone: {step} (p50)", times.median(step) * 1e3, "ms")
        for step in dict.fromkeys((*WHOLE, *OWN))
    ]
    phases: dict[str, list[float]] = defaultdict(list)
    for row in ledger.phases(run=settings.run):
        if row.version > WARM_UP:
            side = "publisher" if row.source == "publisher" else "watcher"
            phases[f"{side}.{row.phase}"].append(row.duration_s)
    inside = [
        Figure(f"phase: {name} (p50)", statistics.median(values) * 1e3, "ms")
        for name, values in phases.items()
    ]
    p50, p95 = quantile(whole, 0.5), quantile(whole, 0.95)
    own_p50 = quantile(blocked, 0.5)
    return Outcome(
        n=len(whole),
        figures=(
            Figure("publish to ack (p50)", p50 * 1e3, "ms", floor_s * 1e3),
            Figure("publish to ack (p95)", p95 * 1e3, "ms", floor_s * 1e3),
            Figure("publish blocks its caller (p50)", own_p50 * 1e3, "ms", own_s * 1e3),
            Figure("publish blocks its caller (p95)", quantile(blocked, 0.95) * 1e3, "ms"),
            *steps,
            *inside,
        ),
        bars=(
            Bar("publish to ack p50 / floor", p50 / floor_s, 1.5),
            Bar("publish to ack p95 / floor", p95 / floor_s, 3.0),
            Bar("publish blocked p50 / its own steps", own_p50 / own_s, 1.3),
        ),
    )


if __name__ == "__main__":
    main("publish_to_ack", __doc__ or "", measure)
