"""A fleet on one Postgres: 64 sidecars, each next to a double of vLLM with loads of 5 ms.

The sidecars run eight to a process, each with a ledger, threads and a status server of its own; the
doubles in two processes; publisher, Postgres and everything else on the same machine. Adapters of
200 kB. The memory of a sidecar over 1,000 versions is measured on one process of its own, at five
versions a second: as fast as one machine can, 30 a second, over three times
as many wait for their grace at version 1,000 as there can be at version 100.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.harness import Bar, Figure, Outcome, log, main, quantile
from policyline.demo import synthetic
from policyline.demo.fleet import sidecar_child
from policyline.demo.settings import DemoSettings
from policyline.engines.simulated.child import SimulatedChild
from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import DEFAULT_LINE
from policyline.publisher import Publisher
from policyline.storage import open_storage
from tests.ledger_builders import acknowledge, publish
from tests.postgres import PostgresServer, fresh_database, start_private

ADAPTER_BYTES = 200_000
WARM_UP = 3
WITHIN_S = 120.0
POLL_S = 5.0
"""The sidecars' default observation period."""
LOADS_S = 1.0
"""For the loads and probes of a window after a restart."""
SETTLE_S = 20.0
"""After the last version: lingering evictions, and copies that wait for their grace."""
MEMORY_PERIOD_S = 0.2
"""From one version to the next where memory is measured."""
CONNECTIONS = 400
LINE_POLL_S = 0.2
"""Between two reads of the whole line, each of hundreds of rows, which must not take the fleet's
processors. The spread is read from the events."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    sidecars: int
    processes: int
    versions: int
    restarts: int
    idle_s: float
    memory: tuple[int, int]


FULL = Size(64, 8, 30, 5, 30.0, (100, 1000))
QUICK = Size(8, 2, 5, 1, 10.0, (20, 60))


def measure(quick: bool) -> Outcome:
    """Run the benchmark."""
    size = QUICK if quick else FULL
    log(f"load average before: {_load()}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="policyline-bench-")))
        server = stack.enter_context(contextlib.contextmanager(start_private)())
        _allow_connections(server)
        floor_s = _floor(stack.enter_context(contextlib.contextmanager(fresh_database)(server)))
        url = stack.enter_context(contextlib.contextmanager(fresh_database)(server))
        fleet = stack.enter_context(_fleet(folder, url, size))
        figures, bars = fleet.measure(floor_s * size.sidecars)
        stack.close()
    figures += [Figure("load average at the end of the fleet", os.getloadavg()[0], "")]
    memory, bar = _measure_memory(size)
    return Outcome(size.versions, (*figures, *memory), (*bars, bar))


def _allow_connections(server: PostgresServer) -> None:
    server.execute(f"ALTER SYSTEM SET max_connections = {CONNECTIONS}")
    server.restart()


def _floor(url: str) -> float:
    """Seconds that one replica's statements about one version take, alone: fetched and ack."""
    with Ledger(url) as ledger:
        claim = ledger.open_run("floor", line="floor")
        member = ledger.join("floor", "r0", EngineFacts("1000.5", "build", 6))
        times = []
        for _ in range(40):
            manifest = publish(ledger, claim)
            begun = time.perf_counter()
            ledger.fetched(member, manifest.version, manifest.digest)
            acknowledge(ledger, member, manifest)
            times.append(time.perf_counter() - begun)
        return quantile(times, 0.5)


@contextlib.contextmanager
def _part(part: str, given: object) -> Iterator[Any]:
    """A process of `fleet_parts`; yields what it prints when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fleet_parts", part, json.dumps(given)],
        cwd=Path(__file__).resolve().parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {part} ended with status {process.wait()}")
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def _fleet(folder: Path, url: str, size: Size) -> Iterator[_Fleet]:
    (folder / "storage").mkdir()
    with ExitStack() as stack:
        urls: list[str] = []
        for _ in range(2):
            urls += stack.enter_context(_part("doubles", size.sidecars // 2))
        engines = {f"r{number:02}": engine for number, engine in enumerate(urls)}
        replicas = list(engines)
        share = size.sidecars // size.processes
        for first in range(0, size.sidecars, share):
            given = {
                "engines": {name: engines[name] for name in replicas[first : first + share]},
                "ledger": url,
                "storage": str(folder / "storage"),
                "caches": str(folder / "caches"),
            }
            stack.enter_context(_part("sidecars", given))
        yield _Fleet(folder, url, engines, size)


@dataclass(frozen=True, slots=True)
class _Fleet:
    folder: Path
    url: str
    engines: dict[str, str]
    size: Size

    def measure(self, floor_s: float) -> tuple[list[Figure], list[Bar]]:
        with Ledger(self.url) as ledger:
            joined = len(self.engines)
            self._until(ledger, lambda v: len(v.replicas) == joined, "all have joined")
            log(f"{joined} sidecars have joined; load average {_load()}")
            spreads = self._publish_all(ledger)
            restarts = [self._restart(ledger, number) for number in range(self.size.restarts)]
        requests, connections = self._idle()
        p50, p95 = quantile(spreads, 0.5), quantile(spreads, 0.95)
        limit_s = 2 * POLL_S + LOADS_S
        each = connections / len(self.engines)
        return (
            [
                Figure("publish to acked by all (p50)", p50, "s", floor_s),
                Figure("publish to acked by all (p95)", p95, "s", floor_s),
                Figure("restart to desired set served (max)", max(restarts), "s"),
                Figure("engine requests while idle", requests, "/s each"),
                Figure("database connections while idle", each, "each"),
            ],
            [
                Bar("publish to acked by all, p95 s", p95, 3.0),
                Bar("restart to desired set served, s", max(restarts), limit_s),
                Bar("idle: requests a second per engine", requests, 1.0),
                Bar("idle: database connections per daemon", each, 1.0),
            ],
        )

    def _publish_all(self, ledger: Ledger) -> list[float]:
        spreads = []
        storage = open_storage(str(self.folder / "storage"))
        with Publisher(ledger, storage, run="bench") as publisher:
            for number in range(1, WARM_UP + self.size.versions + 1):
                adapter = synthetic.write_adapter(
                    self.folder / "adapter", number, size_bytes=ADAPTER_BYTES
                )
                begun = datetime.now(UTC)
                version = publisher.publish(adapter).version
                every = len(self.engines)

                def acked(view: LineSnapshot, version: int = version, every: int = every) -> bool:
                    return len(view.acked_by(version)) == every

                self._until(ledger, acked, f"v{version} is acked by all")
                if number > WARM_UP:
                    spreads.append(self._last_ack(ledger, version, begun))
        log(f"{self.size.versions} versions; load average {_load()}")
        return spreads

    def _last_ack(self, ledger: Ledger, version: int, begun: datetime) -> float:
        events = ledger.events(line=DEFAULT_LINE, version=version, kinds=["version_acked"])
        last = max(datetime.fromisoformat(event.recorded_at) for event in events)
        return (last - begun).total_seconds()

    def _restart(self, ledger: Ledger, number: int) -> float:
        """Restart one engine; seconds until its desired set is served again."""
        replica = list(self.engines)[number * 7 % len(self.engines)]
        before = ledger.view(DEFAULT_LINE).replicas[replica].incarnation
        body = json.dumps({"kind": "restart"}).encode()
        begun = time.monotonic()
        urllib.request.urlopen(f"{self.engines[replica]}/_faults", body).close()

        def served(view: LineSnapshot) -> bool:
            incarnation = view.replicas[replica].incarnation
            again = incarnation not in {None, before}
            return again and all(replica in view.acked_by(d.version) for d in view.desired)

        self._until(ledger, served, f"{replica} serves again")
        return time.monotonic() - begun

    def _idle(self) -> tuple[float, float]:
        """Requests a second per engine, and the fleet's database connections."""
        time.sleep(SETTLE_S)
        before, begun, counts = self._requests(), time.monotonic(), []
        while time.monotonic() - begun < self.size.idle_s:
            counts.append(self._connections())
            time.sleep(1.0)
        seconds = time.monotonic() - begun
        rate = (self._requests() - before) / seconds / len(self.engines)
        log(f"idle; load average {_load()}")
        return rate, quantile(counts, 0.5)

    def _requests(self) -> int:
        total = 0
        for url in self.engines.values():
            with urllib.request.urlopen(f"{url}/_requests") as answer:
                counts: dict[str, int] = json.load(answer)
            total += sum(n for path, n in counts.items() if not path.startswith("/_"))
        return total

    def _connections(self) -> int:
        query = (
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with psycopg.connect(self.url.replace("+psycopg", "")) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def _until(self, ledger: Ledger, condition: Callable[[LineSnapshot], bool], what: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition(ledger.view(DEFAULT_LINE)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
            time.sleep(LINE_POLL_S)


def _measure_memory(size: Size) -> tuple[list[Figure], Bar]:
    """Resident memory of one sidecar after few versions and after many."""
    early, late = size.memory
    with tempfile.TemporaryDirectory(prefix="policyline-bench-") as folder, ExitStack() as stack:
        settings = DemoSettings(workdir=Path(folder), run="bench")
        settings.storage.mkdir()
        upgrade_url(str(settings.ledger))
        engine = stack.enter_context(SimulatedChild(log_path=settings.logs / "engine.log"))
        engine.wait_healthy(30)
        ledger = stack.enter_context(Ledger(str(settings.ledger)))
        child = stack.enter_context(sidecar_child(settings, "r0", engine.url))
        (process,) = _children(child.pid)
        adapter = synthetic.write_adapter(settings.adapter(1), 1)
        found = {}
        storage = open_storage(str(settings.storage))
        with Publisher(ledger, storage, run=settings.run) as publisher:
            for number in range(1, late + 1):
                started = time.monotonic()
                version = publisher.publish(adapter).version
                _await_current(ledger, version)
                if number in size.memory:
                    copies = sum(1 for _ in settings.cache("r0").glob("*/*-v*"))
                    time.sleep(SETTLE_S)
                    found[number] = process.memory_info().rss / 1e6
                    log(f"{number} versions: {found[number]:.1f} MB; {copies} copies before it")
                time.sleep(max(0.0, started + MEMORY_PERIOD_S - time.monotonic()))
    ratio = found[late] / found[early]
    return (
        [Figure(f"resident memory after {late} versions", found[late], "MB", found[early])],
        Bar(f"memory after {late} versions / after {early}", ratio, 1.05),
    )


def _children(pid: int) -> list[psutil.Process]:
    """The sidecar itself is the only child of the guard that ends it with us."""
    deadline = time.monotonic() + WITHIN_S
    while not (children := psutil.Process(pid).children()):
        if time.monotonic() > deadline:
            raise TimeoutError("the sidecar did not start")
        time.sleep(0.05)
    return children


def _await_current(ledger: Ledger, version: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while ledger.view(DEFAULT_LINE).current != version:
        if time.monotonic() > deadline:
            raise TimeoutError(f"v{version} was not current within {WITHIN_S:g} s")
        time.sleep(0.01)


def _load() -> str:
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


if __name__ == "__main__":
    main("fleet", __doc__ or "", measure)
