"""What the router adds: latency and processor time for each request, and for each part of a stream.

Two engines that answer after a fixed 20 ms; the same requests sent straight to one, through a bare
pass-through on the router's libraries, and through the router with gate, affinity and audit. Each
is a process of its own; the router's time includes the upload of rollouts to the ledger.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.fixed_engine import CHUNKS
from benchmarks.harness import Bar, Figure, Outcome, main, quantile
from benchmarks.http_load import load
from policyline.engines.child import ChildServer
from policyline.ledger import EngineFacts, Ledger, RunSettings
from policyline.ledger.db.migrate import upgrade_url
from tests.ledger_builders import FACTS, LINE, acknowledge, publish

MODEL = "trl-policy-v1"
IN_FLIGHT = (1, 128, 384)
STREAMS = 8
ROUNDS = 7
"""Each way is measured so often, in turns. Medians count, and the ratio is the median of the
rounds' own ratios: the machine's speed changes by a third from one minute to the next."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the engines."""

    name: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Processor time that its process has used, all threads."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@dataclass(slots=True)
class Cost:
    """What one way costs, round by round."""

    p50s: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Seconds for each request, or for all parts of a stream."""

    @property
    def p50_s(self) -> float:
        """The rounds' median."""
        return statistics.median(self.p50s)

    @property
    def cpu_s(self) -> float:
        """The rounds' median."""
        return statistics.median(self.cpu)

    def cpu_over(self, other: Cost) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.cpu, other.cpu, strict=True))


@contextmanager
def _child(*command: str) -> Iterator[tuple[int, psutil.Process]]:
    """A process that prints its port; stopped at the end."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _prepare_ledger(url: str, engines: list[int]) -> None:
    """One version that both engines have acked."""
    upgrade_url(url)
    with Ledger(url) as ledger:
        claim = ledger.open_run("bench", line=LINE, settings=RunSettings())
        facts = EngineFacts(FACTS.incarnation, FACTS.build, FACTS.max_loras)
        members = [
            ledger.join(LINE, f"r{n}", facts, url=f"http://127.0.0.1:{port}")
            for n, port in enumerate(engines)
        ]
        manifest = publish(ledger, claim)
        for member in members:
            acknowledge(ledger, member, manifest)


@contextmanager
def _router(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    command = [sys.executable, "-m", "policyline", "router", "--listen", "127.0.0.1:{port}"]
    command += ["--ledger", str(folder / "ledger.db"), "--spool", str(folder / "spool")]
    with ChildServer(command, log_path=folder / "router.log") as child:
        child.wait_healthy(30)
        (process,) = psutil.Process(child.pid).children()
        yield child.port, process


def measure(quick: bool) -> Outcome:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="policyline-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        engines = [stack.enter_context(_child("benchmarks.fixed_engine")) for _ in range(2)]
        ports = [port for port, _ in engines]
        _prepare_ledger(str(folder / "ledger.db"), ports)
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        ways = (
            Way("direct", *engines[0]),
            Way("pass-through", *stack.enter_context(_child("benchmarks.bare_proxy", urls))),
            Way("router", *stack.enter_context(_router(folder))),
        )
        outcome = _compare(ways, quick=quick)
        _check_audit(folder, ways[2].port)
        return outcome


def _compare(ways: tuple[Way, ...], *, quick: bool) -> Outcome:
    totals = {1: 60 if quick else 100, 128: 1500 if quick else 4000, 384: 1500 if quick else 4000}
    streams = 40 if quick else 80
    for way in ways:
        asyncio.run(load(way.port, MODEL, in_flight=16, total=160))
    figures: list[Figure] = []
    bars: list[Bar] = []
    for in_flight in IN_FLIGHT:
        costs = _rounds(ways, in_flight=in_flight, total=totals[in_flight])
        direct, bare, ours = (costs[way.name] for way in ways)
        where = f"{in_flight} in flight"
        added, bare_added = ours.p50_s - direct.p50_s, bare.p50_s - direct.p50_s
        figures += [
            Figure(f"p50 direct, {where}", direct.p50_s * 1e3, "ms"),
            Figure(f"p50 added, {where}", added * 1e3, "ms", bare_added * 1e3),
            Figure(f"processor a request, {where}", ours.cpu_s * 1e6, "us", bare.cpu_s * 1e6),
        ]
        if in_flight == 1:
            bars.append(Bar("added p50 at 1 in flight, ms", added * 1e3, 2.0))
        else:  # at one in flight the process mostly waits, and 10 ms ticks count nothing
            bars.append(Bar(f"processor over pass-through, {where}", ours.cpu_over(bare), 1.5))
    costs = _rounds(ways, in_flight=STREAMS, total=streams, stream=True)
    direct, bare, ours = (costs[way.name] for way in ways)
    per_chunk, bare_chunk = (1e3 * (c.p50_s - direct.p50_s) / CHUNKS for c in (ours, bare))
    figures += [
        Figure(f"added a stream's part, {STREAMS} streams", per_chunk, "ms", bare_chunk),
        Figure(
            "processor a stream's part", ours.cpu_s * 1e6 / CHUNKS, "us", bare.cpu_s * 1e6 / CHUNKS
        ),
    ]
    bars.append(Bar("added a stream's part, ms", per_chunk, 0.2))
    return Outcome(n=sum(totals.values()), figures=tuple(figures), bars=tuple(bars))


def _rounds(
    ways: tuple[Way, ...], *, in_flight: int, total: int, stream: bool = False
) -> dict[str, Cost]:
    costs = {way.name: Cost() for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            before = way.cpu_s()
            done = asyncio.run(
                load(way.port, MODEL, in_flight=in_flight, total=total, stream=stream)
            )
            if done.bad:
                raise RuntimeError(f"{done.bad} answers of {way.name} are no success")
            costs[way.name].p50s.append(quantile(done.seconds, 0.5))
            costs[way.name].cpu.append((way.cpu_s() - before) / total)
    return costs


def _check_audit(folder: Path, port: int) -> None:
    """Every answer is in the ledger, once."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        noted = _figure(answer.read().decode(), "policyline_router_rollouts_recorded_total")
    deadline = time.monotonic() + 20
    with Ledger(str(folder / "ledger.db")) as ledger:
        while (recorded := sum(ledger.rollout_counts(LINE, 1).values())) != noted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{recorded} rollouts are recorded of {noted}")
            time.sleep(0.1)


def _figure(metrics: str, name: str) -> int:
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return round(float(line.split()[1]))


if __name__ == "__main__":
    main("router_overhead", __doc__ or "", measure)
