"""What an idle sidecar costs: processor, memory, and requests to its engine.

One double of vLLM, which counts its requests, and one sidecar, each a process of its own; a full
window is served and nothing is published.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.harness import Bar, Figure, Outcome, main
from policyline.demo import synthetic
from policyline.demo.fleet import sidecar_child
from policyline.demo.settings import DemoSettings
from policyline.engines.child import ChildServer
from policyline.engines.simulated.child import SimulatedChild
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.publisher import Publisher
from policyline.storage import open_storage

MEASURE_S = 60.0
QUICK_MEASURE_S = 30.0
SETTLE_S = 5.0
"""After the last ack: lingering evictions and the first heartbeats are not idleness."""
CURRENT_WITHIN_S = 30.0
VERSIONS = 5


def measure(quick: bool) -> Outcome:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="policyline-bench-") as folder:
        return _measure(Path(folder), QUICK_MEASURE_S if quick else MEASURE_S)


def _measure(folder: Path, seconds: float) -> Outcome:
    settings = DemoSettings(workdir=folder, run="bench")
    settings.storage.mkdir()
    upgrade_url(str(settings.ledger))
    with ExitStack() as stack:
        engine = stack.enter_context(SimulatedChild(log_path=settings.logs / "engine.log"))
        engine.wait_healthy(30)
        ledger = stack.enter_context(Ledger(str(settings.ledger)))
        sidecar = stack.enter_context(sidecar_child(settings, "r0", engine.url))
        _fill_window(ledger, settings)
        time.sleep(SETTLE_S)
        return _watch(_process(sidecar), engine.url, seconds)


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


def _requests(engine_url: str) -> int:
    """How many requests the double has had, this kind not counted."""
    with urllib.request.urlopen(f"{engine_url}/_requests") as answer:
        counts: dict[str, int] = json.load(answer)
    return sum(counts.values())


def _watch(process: psutil.Process, engine_url: str, seconds: float) -> Outcome:
    requests, begun = _requests(engine_url), time.monotonic()
    before = process.cpu_times()
    resident: list[int] = []
    while time.monotonic() - begun < seconds:
        resident.append(process.memory_info().rss)
        time.sleep(1.0)
    after, elapsed_s = process.cpu_times(), time.monotonic() - begun
    core_percent = 100 * (after.user + after.system - before.user - before.system) / elapsed_s
    resident_mb = max(resident) / 1e6
    requests_per_s = (_requests(engine_url) - requests) / elapsed_s
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
