"""The ledger's bars: appends, a ledger of a million events, and followers.

* Append, against a bare INSERT and COMMIT of the same row with the same driver and durability.
* Verify and fold a ledger of 1,000,000 events and 1,000,000 rollouts, built by `import`; then what
  auditors ask of it.
* 32 followers of one Postgres: from the append's return until the last has read the event.
"""

from __future__ import annotations

import contextlib
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness import Bar, Figure, Outcome, log, main, quantile
from benchmarks.long_history import write_long_history
from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.db import schema
from policyline.ledger.db.connect import connect, ledger_url
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.events import NewEvent, seal
from policyline.ledger.read.as_of import as_of, seq_at
from policyline.ledger.read.audit import audit
from policyline.ledger.store import Claim
from policyline.ledger.transfer import import_into
from tests.postgres import PostgresServer, fresh_database, start

LINE = "trl-policy"
ROUNDS = 15
PER_ROUND = 100
EVENTS = 1_000_000
ROLLOUTS = 1_000_000
QUESTIONS = 200
FOLLOWERS = 32
SPREADS = 60

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def measure(quick: bool) -> Outcome:
    """Everything on both databases."""
    scale = 20 if quick else 1
    figures: list[Figure] = []
    bars: list[Bar] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(contextlib.contextmanager(start)())
        history = folder / "history.jsonl"
        log(f"writing a history of {EVENTS // scale} events")
        write_long_history(history, EVENTS // scale, ROLLOUTS // scale)
        for name, make in (("sqlite", _sqlite(folder)), ("postgres", _postgres(server, stack))):
            log(f"{name}: appends")
            measure_appends(name, make("append"), figures, bars, rounds=5 if quick else ROUNDS)
            log(f"{name}: {EVENTS // scale} events")
            measure_long_history(name, make("long"), history, figures, bars)
        log(f"{FOLLOWERS} followers on one Postgres")
        url = _postgres(server, stack)("follow")
        measure_followers(url, figures, bars, spreads=10 if quick else SPREADS)
    return Outcome(n=EVENTS // scale, figures=tuple(figures), bars=tuple(bars))


def _sqlite(folder: Path) -> Callable[[str], str]:
    def make(name: str) -> str:
        url = str(folder / f"{name}.db")
        upgrade_url(url)
        return url

    return make


def _postgres(server: PostgresServer, stack: contextlib.ExitStack) -> Callable[[str], str]:
    def make(_name: str) -> str:
        return stack.enter_context(contextlib.contextmanager(fresh_database)(server))

    return make


def measure_appends(
    name: str, url: str, figures: list[Figure], bars: list[Bar], *, rounds: int
) -> None:
    """Append events, in turn with bare rows, so that both see the same machine."""
    bare, plain, reserved = [], [], []
    with Ledger(url) as ledger, contextlib.contextmanager(_bare_inserts)(url) as insert:
        claim = ledger.open_run("r")
        member = ledger.join(LINE, "r0", EngineFacts("1"))
        for _ in range(rounds):
            bare.append(_rate(insert))
            plain.append(_rate(lambda: ledger.fetched(member, 1, "d" * 64)))
            reserved.append(_rate(lambda: ledger.reserve(claim)))
    floor = statistics.median(bare)
    figures.append(
        Figure(f"{name}: fetched, appends a second", statistics.median(plain), "1/s", floor)
    )
    figures.append(
        Figure(f"{name}: reserved, appends a second", statistics.median(reserved), "1/s", floor)
    )
    ratio = statistics.median(p / b for p, b in zip(plain, bare, strict=True))
    bars.append(Bar(f"{name}: append rate over a bare insert's", ratio, 0.4, ">="))


def _rate(append: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(PER_ROUND):
        append()
    return PER_ROUND / (time.perf_counter() - began)


def _bare_inserts(url: str) -> Iterator[Callable[[], None]]:
    """INSERT and COMMIT of one event's columns into a table with a primary key, by the driver."""
    engine = connect(ledger_url(url))
    sqlite = engine.dialect.name == "sqlite"
    mark = "?" if sqlite else "%s"
    connection = engine.raw_connection()
    driver = connection.driver_connection
    if driver is None:
        raise RuntimeError("no connection")
    cursor = driver.cursor()
    names = [c.name for c in schema.events.columns]
    types = ", ".join(
        f"{n} {'bigint' if n == 'seq' else 'text'}{' primary key' if n == 'seq' else ''}"
        for n in names
    )
    cursor.execute(f"CREATE TABLE bare ({types})")
    driver.commit()
    statement = f"INSERT INTO bare VALUES ({', '.join([mark] * len(names))})"
    new = NewEvent("version_fetched", LINE, "r", "key", "me@here:1", {"digest": "d" * 64}, 1, "r0")
    event = seal(new, seq=1, recorded_at=NOW.isoformat(), prev_hash="0" * 64)
    values = [getattr(event, n) for n in names]

    def insert() -> None:
        values[0] += 1
        if sqlite:
            cursor.execute("BEGIN IMMEDIATE")
        cursor.execute(statement, values)
        driver.commit()

    yield insert
    connection.close()
    engine.dispose()


MEASURED_VERIFY = """
import resource, sys, time
from policyline.ledger import Ledger
from policyline.ledger.read.verify import verify
with Ledger(sys.argv[1]) as ledger:
    began = time.perf_counter()
    report = verify(ledger)
    seconds = time.perf_counter() - began
assert report.ok, report.problems[:3]
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, report.events)
"""


def measure_long_history(
    name: str, url: str, history: Path, figures: list[Figure], bars: list[Bar]
) -> None:
    """Import, verify, ask."""
    with Ledger(url) as ledger:
        began = time.perf_counter()
        with history.open(encoding="utf-8") as lines:
            count = import_into(ledger, lines)
        figures.append(Figure(f"{name}: import", time.perf_counter() - began, "s"))
        result = subprocess.run(
            [sys.executable, "-c", MEASURED_VERIFY, url],
            check=True,
            capture_output=True,
            text=True,
        )
        seconds, megabytes, checked = map(float, result.stdout.split())
        if checked != count:
            raise RuntimeError(f"verified {checked} of {count} events")
        figures.append(Figure(f"{name}: verify and fold", seconds, "s"))
        figures.append(Figure(f"{name}: verify, peak resident", megabytes, "MB"))
        bars.append(Bar(f"{name}: verify and fold, seconds", seconds, 60))
        bars.append(Bar(f"{name}: verify and fold, MB", megabytes, 300))
        measure_questions(name, ledger, figures, bars)


def measure_questions(name: str, ledger: Ledger, figures: list[Figure], bars: list[Bar]) -> None:
    """What auditors ask of a long history."""
    versions = len(ledger.versions(line=LINE))
    chance = random.Random(1)
    now = ledger.view(LINE)
    moments = [e.recorded_at for e in ledger.events(after=now.seq // 2, limit=QUESTIONS)]

    def ask_time() -> object:
        return as_of(ledger, LINE, seq_at(ledger, chance.choice(moments), NOW))

    questions: dict[str, Callable[[], object]] = {
        "status": lambda: ledger.view(LINE),
        "as-of an event": lambda: as_of(ledger, LINE, chance.randint(1, now.seq)),
        "as-of a time": ask_time,
        "audit of a version": lambda: audit(ledger, LINE, chance.randint(1, versions)),
    }
    for question, ask in questions.items():
        times = [_seconds(ask) * 1e3 for _ in range(QUESTIONS)]
        figures.append(Figure(f"{name}: {question}, p95", quantile(times, 0.95), "ms"))
        bars.append(Bar(f"{name}: {question}, p95 ms", quantile(times, 0.95), 100))


def _seconds(ask: Callable[[], object]) -> float:
    began = time.perf_counter()
    ask()
    return time.perf_counter() - began


FOLLOWER = """
import sys, time
from policyline.ledger import Ledger
with Ledger(sys.argv[1]) as ledger:
    seen = ledger.head()[0]
    for _ in ledger.follow(poll_s=None):
        for event in ledger.events(after=seen):
            seen = event.seq
        print(seen, time.monotonic_ns(), flush=True)
"""


def measure_followers(url: str, figures: list[Figure], bars: list[Bar], *, spreads: int) -> None:
    """Each follower is a process; CLOCK_MONOTONIC is one clock for all of them."""
    received: queue.Queue[tuple[int, int]] = queue.Queue()
    processes = [
        subprocess.Popen([sys.executable, "-c", FOLLOWER, url], stdout=subprocess.PIPE, text=True)
        for _ in range(FOLLOWERS)
    ]
    for process in processes:
        threading.Thread(target=_listen, args=(process, received), daemon=True).start()
    try:
        with Ledger(url) as ledger:
            claim = ledger.open_run("r")
            _wait_until_all_listen(ledger, claim, received)
            delays = [_spread(ledger, claim, received) for _ in range(spreads)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    p95 = quantile(delays, 0.95)
    figures.append(Figure("an event reaches 32 followers, p50", quantile(delays, 0.5), "ms"))
    figures.append(Figure("an event reaches 32 followers, p95", p95, "ms"))
    bars.append(Bar("an event reaches 32 followers, p95 ms", p95, 250))


def _listen(process: subprocess.Popen[str], received: queue.Queue[tuple[int, int]]) -> None:
    if process.stdout is not None:
        for line in process.stdout:
            seq, moment = line.split()
            received.put((int(seq), int(moment)))


def _wait_until_all_listen(
    ledger: Ledger, claim: Claim, received: queue.Queue[tuple[int, int]]
) -> None:
    """Append until an event has been received by all: those still starting receive nothing."""
    while True:
        seq = ledger.reserve(claim).anchor.seq
        reached, until = 0, time.monotonic() + 2
        while reached < FOLLOWERS and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                reached += received.get(timeout=0.1)[0] >= seq
        if reached >= FOLLOWERS:
            return


def _spread(ledger: Ledger, claim: Claim, received: queue.Queue[tuple[int, int]]) -> float:
    """Milliseconds from the append's return until the last follower has read the event."""
    seq = ledger.reserve(claim).anchor.seq
    done = time.monotonic_ns()
    last, reached = done, 0
    while reached < FOLLOWERS:
        found, moment = received.get(timeout=30)
        if found >= seq:
            reached += 1
            last = max(last, moment)
    return (last - done) / 1e6


if __name__ == "__main__":
    main("ledger", __doc__, measure)
