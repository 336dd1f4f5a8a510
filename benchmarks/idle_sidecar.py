"""What an idle sidecar costs: processor, memory, and requests to its engine.

One double of vLLM, one sidecar as a process of its own, a full window served, nothing published.
The requests are counted by a relay between the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import Bar, Figure, Outcome, main
from ledger import Ledger
from ledger.migrate import upgrade_url
from policyline.demo import synthetic
from policyline.demo.fleet import sidecar_child
from policyline.demo.settings import DemoSettings
from policyline.engines.child import ChildServer
from policyline.engines.simulated.child import SimulatedChild
from publisher import Publisher
from storage import open_storage

MEASURE_S = 60.0
QUICK_MEASURE_S = 30.0
SETTLE_S = 5.0
"""After the last ack: lingering evictions and the first heartbeats are not idleness."""
CURRENT_WITHIN_S = 30.0
VERSIONS = 5
METHODS = (b"GET ", b"POST ")


@dataclass(slots=True)
class Relay:
    """Passes bytes to the engine and counts the requests among them."""

    port: int
    requests: int = 0
    listening: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        answers, requests = await asyncio.open_connection("127.0.0.1", self.port)
        # A connection is cancelled at the very end; asyncio would report that as an error.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(
                self._pass(reader, requests, count=True), self._pass(answers, writer, count=False)
            )

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, count: bool
    ) -> None:
        # The client sends each request in one piece, so that it begins a read.
        while data := await source.read(1 << 16):
            self.requests += count and data.startswith(METHODS)
            sink.write(data)
            await sink.drain()
        sink.close()


@asynccontextmanager
async def _relayed(engine: SimulatedChild) -> AsyncIterator[Relay]:
    relay = Relay(engine.port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.listening = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()


def measure(quick: bool) -> Outcome:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="policyline-bench-") as folder:
        return asyncio.run(_measure(Path(folder), QUICK_MEASURE_S if quick else MEASURE_S))


async def _measure(folder: Path, seconds: float) -> Outcome:
    settings = DemoSettings(workdir=folder, run="bench")
    settings.storage.mkdir()
    upgrade_url(str(settings.ledger))
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(SimulatedChild(log_path=settings.logs / "engine.log"))
        engine.wait_healthy(30)
        relay = await stack.enter_async_context(_relayed(engine))
        ledger = stack.enter_context(Ledger(str(settings.ledger)))
        url = f"http://127.0.0.1:{relay.listening}"
        sidecar = stack.enter_context(sidecar_child(settings, "r0", url))
        await asyncio.to_thread(_fill_window, ledger, settings)
        await asyncio.sleep(SETTLE_S)
        return await _watch(_process(sidecar), relay, seconds)


def _fill_window(ledger: Ledger, settings: DemoSettings) -> None:
    """Publish as many versions as the window holds, each once its predecessor is current."""
    with Publisher(ledger, open_storage(str(settings.storage)), run=settings.run) as publisher:
        for number in range(1, VERSIONS + 1):
            publisher.publish(synthetic.write_adapter(settings.adapter(number), number))
            deadline = time.monotonic() + CURRENT_WITHIN_S
            while ledger.view(settings.line).current != number:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"v{number} was not current within {CURRENT_WITHIN_S:g} s")
                time.sleep(0.05)


def _process(sidecar: ChildServer) -> psutil.Process:
    """The sidecar itself: the only child of the guard that ends it with us."""
    (process,) = psutil.Process(sidecar.pid).children()
    return process


async def _watch(process: psutil.Process, relay: Relay, seconds: float) -> Outcome:
    requests, begun = relay.requests, time.monotonic()
    before = process.cpu_times()
    resident: list[int] = []
    while time.monotonic() - begun < seconds:
        resident.append(process.memory_info().rss)
        await asyncio.sleep(1.0)
    after, elapsed_s = process.cpu_times(), time.monotonic() - begun
    core_percent = 100 * (after.user + after.system - before.user - before.system) / elapsed_s
    resident_mb = max(resident) / 1e6
    requests_per_s = (relay.requests - requests) / elapsed_s
    return Outcome(
        n=round(elapsed_s),
        figures=(
            Figure("processor", core_percent, "% of a core"),
            Figure("resident memory (max)", resident_mb, "MB"),
            Figure("engine requests", requests_per_s, "/s"),
            Figure("threads", process.num_threads(), ""),
        ),
        bars=(
            Bar("processor, % of a core", core_percent, 1.0),
            Bar("resident memory, MB", resident_mb, 120.0),
            Bar("engine requests a second", requests_per_s, 1.0),
        ),
    )


if __name__ == "__main__":
    main("idle_sidecar", __doc__ or "", measure)
