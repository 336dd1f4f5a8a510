"""Many at once: dense order, no gap for a reader, one snapshot for each answer."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.db import connect as connections
from policyline.ledger.db.append_lock import take_lock
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.events import Event
from policyline.ledger.read.verify import verify
from policyline.ledger.rollouts import RolloutFilter
from policyline.ledger.transfer import export, import_into
from tests.behind_the_back import run_sql
from tests.integration.ledger.test_queries import rollout
from tests.ledger_builders import FACTS, LINE, acknowledge, publish, state_at

WITHIN_S = 30.0
PROCESSES = 8
APPENDS = 500

WRITER = """
import sys
from policyline.ledger import Claim, EngineFacts, Ledger
url, name, count, epoch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with Ledger(url) as ledger:
    member = ledger.join("trl-policy", name, EngineFacts("1"))
    claim = Claim("trl-policy", "r1", epoch)
    for i in range(count // 2):
        ledger.foreign_adapter_seen(member, f"{name}-{i}", "/x", "test")
        ledger.reserve(claim, attempt=f"{name}-{i}")
"""


class Tail:
    """A reader that follows the events from another connection until it was told the end."""

    def __init__(self, url: str) -> None:
        self.seen: list[Event] = []
        self._url = url
        self._until: int | None = None
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        with Ledger(self._url) as ledger:
            while self._until is None or len(self.seen) < self._until:
                after = self.seen[-1].seq if self.seen else 0
                self.seen.extend(ledger.events(after=after))

    def read_until(self, seq: int) -> list[int]:
        """The seqs it saw, in the order in which it saw them."""
        self._until = seq
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive(), f"saw {len(self.seen)} of {seq} events"
        return [event.seq for event in self.seen]


@pytest.mark.timeout(120)
def test_eight_processes_append_to_one_dense_chain_and_a_tail_misses_nothing(
    ledger_url: str, ledger: Ledger
) -> None:
    claim = ledger.open_run("r1")
    tail = Tail(ledger_url)
    names = [f"w{i}" for i in range(PROCESSES)]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, ledger_url, name, str(APPENDS), str(claim.epoch)]
        )
        for name in names
    ]
    assert [w.wait(timeout=100) for w in writers] == [0] * PROCESSES
    total = 1 + PROCESSES * (1 + APPENDS)
    assert ledger.head()[0] == total
    assert tail.read_until(total) == list(range(1, total + 1))
    reserved = [e for e in tail.seen if e.kind == "version_reserved"]
    assert [e.version for e in reserved] == list(range(1, PROCESSES * APPENDS // 2 + 1))
    wanted = sorted(f"{name}-{i}" for name in names for i in range(APPENDS // 2))
    assert sorted(e.data["attempt"] for e in reserved) == wanted
    foreign = [e.data["name"] for e in tail.seen if e.kind == "foreign_adapter_seen"]
    assert sorted(foreign) == wanted
    assert verify(ledger).problems == ()


RACER = """
import json, sys
from policyline.ledger import Ledger
from policyline.ledger.errors import StaleEpoch
from tests.ledger_builders import manifest_for
url, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
published, told = [], []
with Ledger(url, actor=name) as ledger:
    for _ in range(rounds):
        claim = ledger.open_run("r1", take_over=True)
        try:
            for _ in range(3):
                reservation = ledger.reserve(claim)
                ledger.publish(claim, manifest_for(reservation, name))
                published.append(reservation.version)
        except StaleEpoch as fenced:
            told.append(fenced.holder)
print(json.dumps([published, told]))
"""


def test_of_two_racing_publishers_one_wins_each_number_and_the_other_is_told_by_whom(
    ledger_url: str, ledger: Ledger
) -> None:
    names = ("one@there:1", "two@there:2")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, ledger_url, name, "40"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    said = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    for (_, told), other in zip(said, reversed(names), strict=True):
        assert set(told) <= {other}
    publishers = {v: name for (mine, _), name in zip(said, names, strict=True) for v in mine}
    assert len(publishers) == sum(len(mine) for mine, _ in said)
    rows = {r.version: r for r in ledger.versions(line=LINE) if r.digest is not None}
    assert {v: r.publisher for v, r in rows.items()} == publishers
    assert verify(ledger).problems == ()


def test_a_reader_passes_no_gap_while_a_writer_is_held_open(
    ledger_url: str, ledger: Ledger
) -> None:
    """The slow writer has its number already when the fast one asks: the fast one must wait."""
    claim = ledger.open_run("r1")
    written, held, go_on = threading.Event(), threading.Event(), threading.Event()

    def write_slowly() -> None:
        with Ledger(ledger_url) as slow, slow._appending() as journal:
            slow._append(journal, "fleet_paused", line=LINE, run="r1", payload={"reason": "x"})
            held.set()
            assert go_on.wait(WITHIN_S)

    def write_fast() -> None:
        with Ledger(ledger_url) as fast:
            fast.reserve(claim)
            written.set()

    threads = [threading.Thread(target=write_slowly), threading.Thread(target=write_fast)]
    threads[0].start()
    assert held.wait(WITHIN_S)
    threads[1].start()
    tail = Tail(ledger_url)
    assert not written.wait(0.3)
    assert ledger.head()[0] == 1
    go_on.set()
    for thread in threads:
        thread.join(WITHIN_S)
    assert tail.read_until(3) == [1, 2, 3]
    assert [e.kind for e in tail.seen[1:]] == ["fleet_paused", "version_reserved"]


def test_bulk_work_waits_for_the_lock_no_longer_than_an_append(
    ledger_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.05)
    with Ledger(ledger_url) as impatient, ledger._appending():
        with pytest.raises(LedgerUnavailable, match="lock"):
            import_into(impatient, export(impatient))
        with pytest.raises(LedgerUnavailable, match="lock"):
            upgrade_url(ledger_url)


@contextmanager
def interrupted(ledger: Ledger, part: str, action: Callable[[], object]) -> Iterator[list[str]]:
    """Run `action` once, right after the reader's first statement that contains `part`."""
    ran: list[str] = []

    def after(_conn: object, _cursor: object, statement: str, *_rest: object) -> None:
        if part in statement and not ran:
            ran.append(statement)
            action()

    sa.event.listen(ledger._engine, "after_cursor_execute", after)
    try:
        yield ran
    finally:
        sa.event.remove(ledger._engine, "after_cursor_execute", after)


@pytest.mark.parametrize("part", ["FROM head", "FROM versions", "AS pinned", "FROM replicas"])
def test_an_answer_of_several_statements_is_one_snapshot(
    ledger_url: str, ledger: Ledger, part: str
) -> None:
    """Others append between two statements of a view; it shows one event all the same."""
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "r0", FACTS)
    for _ in range(2):
        acknowledge(ledger, member, publish(ledger, claim))

    def meanwhile() -> None:
        with Ledger(ledger_url) as other:
            acknowledge(other, member, publish(other, claim))
            other.join(LINE, "r1", FACTS)

    with interrupted(ledger, part, meanwhile) as ran:
        view = ledger.view(LINE, also=range(1, 5))
    assert ran
    assert ledger.head()[0] > view.seq
    state = state_at(ledger, LINE, view.seq)
    assert (view.line, view.replicas) == (state.line, state.replicas)
    assert {d.version for d in view.desired} == {1, 2}
    assert view.residency == state.residency


def test_verification_is_not_alarmed_by_writers(ledger_url: str, ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    publish(ledger, claim)

    ledger.record_rollouts(LINE, "b0", [rollout(0, 1)])
    numbers = itertools.count(1)

    def meanwhile() -> None:
        with Ledger(ledger_url) as other:
            publish(other, claim)
            number = next(numbers)
            other.record_rollouts(LINE, f"b{number}", [rollout(number, 1)])

    for part in ("FROM head", "FROM lines", "max(rollouts.id)", "FROM rollouts"):
        with interrupted(ledger, part, meanwhile) as ran:
            assert verify(ledger).problems == ()
        assert ran


def test_an_export_holds_no_rollouts_of_later_batches(ledger_url: str, ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    publish(ledger, claim)
    ledger.record_rollouts(LINE, "b1", [rollout(1, 1)])
    lines = export(ledger)
    header = json.loads(next(lines))
    ledger.record_rollouts(LINE, "b2", [rollout(2, 1)])
    rest = [json.loads(line) for line in lines]
    assert sum("event" in line for line in rest) == header["events"] == 5
    assert [line["rollout"]["batch"] for line in rest if "rollout" in line] == ["b1"]
    assert len(list(ledger.rollouts(RolloutFilter()))) == 2


def test_a_stricter_default_isolation_changes_nothing(postgres_url: str) -> None:
    """At REPEATABLE READ the snapshot would be older than the lock, and the head stale."""
    name = connections.ledger_url(postgres_url).database
    run_sql(
        postgres_url,
        f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'",
    )
    with Ledger(postgres_url) as one, Ledger(postgres_url) as two:
        claim = one.open_run("r1")
        member = two.join(LINE, "r0", FACTS)
        waiting = threading.Thread(target=lambda: two.reserve(claim))
        with one._appending() as journal:
            waiting.start()
            wait_until_blocked(postgres_url)
            one._append(journal, "fleet_resumed", line=LINE, payload={})
        waiting.join(WITHIN_S)
        two.beat(member, 1)
        assert [e.seq for e in one.events()] == [1, 2, 3, 4]


def wait_until_blocked(url: str, count: int = 1) -> None:
    """Return once so many wait for the ledger's lock, or for the head's row."""
    engine = connections.connect(connections.ledger_url(url))
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with engine.connect() as connection:
        while connection.exec_driver_sql(query).scalar() != count:
            connection.rollback()
    engine.dispose()


def test_upgrades_at_once_are_one(bare_postgres_url: str) -> None:
    """Postgres: SQLite's transactions exclude each other anyway."""
    program = (
        "import sys; from policyline.ledger.db.migrate import upgrade_url; upgrade_url(sys.argv[1])"
    )
    command = [sys.executable, "-c", program, bare_postgres_url]
    engine = connections.connect(connections.ledger_url(bare_postgres_url))
    with engine.connect() as connection:
        take_lock(connection)
        upgrades = [subprocess.Popen(command) for _ in range(3)]
        wait_until_blocked(bare_postgres_url, 3)
    engine.dispose()
    assert [upgrade.wait(timeout=WITHIN_S) for upgrade in upgrades] == [0, 0, 0]
    with Ledger(bare_postgres_url) as ledger:
        assert ledger.reserve(ledger.open_run("r1")).version == 1


def test_one_ledger_object_serves_many_threads(ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    numbers: list[int] = []

    def work(name: str) -> None:
        member = ledger.join(LINE, name, EngineFacts("1"))
        for i in range(20):
            ledger.beat(member, i)
            numbers.append(ledger.reserve(claim).version)
            ledger.view(LINE)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert sorted(numbers) == list(range(1, 121))
    assert verify(ledger).problems == ()
