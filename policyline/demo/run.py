"""The demo from beginning to end: make, start, publish under traffic, check, stop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from policyline.demo import checks, report, synthetic
from policyline.demo.checks import Check
from policyline.demo.client import Traffic, TrafficClient
from policyline.demo.errors import DemoError, EngineMissing
from policyline.demo.fleet import Fleet, run_to_end
from policyline.demo.progress import Progress, Step
from policyline.demo.report import Report
from policyline.demo.settings import DemoSettings, EngineKind
from policyline.engines.vllm import vllm_available
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.db.migrate import upgrade_url
from policyline.publisher import Publisher
from policyline.storage import open_storage
from policyline.watcher.vllm.client import EngineClient

SETTLE_WITHIN_S = 60.0
"""Longest wait for a version to become current, then for the fleet to settle."""
_POLL_S = 0.02


def require_engine(engine: EngineKind) -> None:
    """Find out before anything is started whether the engine is there.

    Raises:
        EngineMissing: vLLM is not installed.
    """
    missing = vllm_available() if engine is EngineKind.VLLM else None
    if missing is not None:
        raise EngineMissing(missing, hint="or run the demo with --engine sim")


async def run_demo(settings: DemoSettings, progress: Progress) -> Report:
    """Run it all and stop everything that was started, whatever happens.

    Raises:
        DemoError: a step did not work, so that nothing could be checked.
    """
    begun = time.monotonic()
    settings.storage.mkdir(parents=True)
    upgrade_url(str(settings.ledger))
    with Fleet(settings) as fleet, Ledger(str(settings.ledger)) as ledger:
        traffic, found = await _play(settings, fleet, ledger, progress)
        with progress.step("stopping everything"):
            await asyncio.to_thread(fleet.stop)
        found.append(checks.no_orphaned_process(fleet.mark))
        # After the sidecars have left, so that their last events are part of it.
        found.insert(-1, checks.replay_equals_tables(ledger))
        return report.build(ledger, settings, traffic, found, time.monotonic() - begun)


async def _play(
    settings: DemoSettings, fleet: Fleet, ledger: Ledger, progress: Progress
) -> tuple[Traffic, list[Check]]:
    async with AsyncExitStack() as stack:
        await _make_base(settings, progress)
        with progress.step(f"starting {settings.replicas} engines side by side"):
            fleet.start_engines()
            await _make_adapters(settings)
            engines = await fleet.wait_engines(stack)
        with progress.step(f"starting {settings.replicas} sidecars"):
            await fleet.start_sidecars(ledger)
        async with _generating(ledger, settings, engines) as client:
            with progress.step(f"publishing {settings.versions} versions") as step:
                await _publish_all(settings, fleet, ledger, client.traffic, step)
            with progress.step("letting the fleet settle"):
                await _settle(settings, fleet, ledger)
        with progress.step("checking"):
            return client.traffic, await _check(settings, ledger, engines, client.traffic)


async def _make_base(settings: DemoSettings, progress: Progress) -> None:
    if settings.engine is EngineKind.VLLM:
        with progress.step("making a tiny base model and its tokenizer"):
            await _tiny_model(settings, "base", str(settings.model))


async def _make_adapters(settings: DemoSettings) -> None:
    if settings.engine is EngineKind.VLLM:
        paths = (str(settings.model), str(settings.adapters))
        await _tiny_model(settings, "adapters", *paths, str(settings.versions))
    else:
        for number in range(1, settings.versions + 1):
            synthetic.write_adapter(settings.adapter(number), number)


async def _tiny_model(settings: DemoSettings, what: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "policyline.demo.tiny_model", what, *arguments]
    await run_to_end(command, settings.logs / f"{what}.log", f"making the {what}")


@asynccontextmanager
async def _generating(
    ledger: Ledger, settings: DemoSettings, engines: Mapping[str, EngineClient]
) -> AsyncIterator[TrafficClient]:
    """Keep requests going while the block runs."""
    client = TrafficClient(ledger, settings.line, engines)
    requests = asyncio.create_task(client.run())
    try:
        yield client
        client.stop()
        await requests
    finally:
        requests.cancel()


async def _publish_all(
    settings: DemoSettings, fleet: Fleet, ledger: Ledger, traffic: Traffic, step: Step
) -> None:
    """Publish one adapter after another, each once its predecessor is current."""
    rules = RunSettings(max_staleness=settings.max_staleness)
    storage = open_storage(str(settings.storage))
    with Publisher(ledger, storage, run=settings.run, settings=rules) as publisher:
        for number in range(1, settings.versions + 1):
            published = await asyncio.to_thread(publisher.publish, settings.adapter(number))
            is_current = partial(_is_current, ledger, settings.line, published.version)
            await _wait(is_current, fleet, f"{published.name} to become current")
            step.update(
                f"published {published.name} ({number} of {settings.versions}), "
                f"{traffic.sent} requests so far"
            )


def _is_current(ledger: Ledger, line: str, version: int) -> bool:
    return ledger.view(line).current == version


async def _settle(settings: DemoSettings, fleet: Fleet, ledger: Ledger) -> None:
    """Wait until every replica serves exactly the window, as far as the ledger knows."""

    def settled() -> bool:
        view = ledger.view(settings.line)
        desired = {d.version for d in view.desired}
        served = {replica: set[int]() for replica in settings.replica_names}
        for row in ledger.residency(settings.line):
            if row.state == "acked":
                served[row.replica].add(row.version)
        return all(versions == desired for versions in served.values())

    # Whether they never do is a check of its own, version by version.
    with contextlib.suppress(Unsettled):
        await _wait(settled, fleet, "the replicas to serve exactly the window")


class Unsettled(DemoError):
    """The fleet did not get where it should within the time allowed."""


async def _wait(condition: Callable[[], bool], fleet: Fleet, what: str) -> None:
    """Poll `condition` in a thread until it holds.

    Raises:
        Unsettled: `SETTLE_WITHIN_S` has passed.
        DemoError: a process of the fleet has ended.
    """
    deadline = time.monotonic() + SETTLE_WITHIN_S
    while not await asyncio.to_thread(condition):
        fleet.check_alive()
        if time.monotonic() > deadline:
            raise Unsettled(
                f"waited {SETTLE_WITHIN_S:g} s for {what}", hint=f"see {fleet.settings.logs}"
            )
        await asyncio.sleep(_POLL_S)


async def _check(
    settings: DemoSettings, ledger: Ledger, engines: Mapping[str, EngineClient], traffic: Traffic
) -> list[Check]:
    view = await asyncio.to_thread(ledger.view, settings.line)
    rows = ledger.versions(run=settings.run)
    seen = await checks.observe(engines, [desired.name for desired in view.desired])
    return [
        checks.window_served(view, seen, newest=max(row.version for row in rows)),
        checks.answers_differ(view, seen),
        checks.out_of_window_evicted(view, rows, seen),
        checks.no_request_failed(traffic),
        await asyncio.to_thread(checks.digests_agree, rows, settings.storage, seen),
    ]
