"""One connection a process: counted by the server itself."""

from __future__ import annotations

import threading
import time

import sqlalchemy as sa

from policyline.ledger import Ledger
from policyline.ledger.db import connect
from policyline.ledger.db.pool import MAX_EXTRA, PATIENCE_S
from tests.behind_the_back import transaction
from tests.ledger_builders import FACTS, LINE, acknowledge, publish

WITHIN_S = 20.0


def connections(url: str) -> int:
    """How many this database has, but for the one that asks."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    with transaction(url) as connection:
        return int(connection.exec_driver_sql(query).scalar() or 0)


def until_connections(url: str, count: int) -> None:
    """Closing one is known to the server a moment later."""
    deadline = time.monotonic() + WITHIN_S
    while connections(url) != count:
        assert time.monotonic() < deadline, connections(url)


class Hearing:
    """Somebody who waits for signals."""

    def __init__(self, ledger: Ledger, *, details: bool = True) -> None:
        self.heard = threading.Semaphore(0)
        self._follower = ledger.follow(poll_s=None, details=details)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        assert self.heard.acquire(timeout=WITHIN_S)

    def _listen(self) -> None:
        for _ in self._follower:
            self.heard.release()

    def end(self) -> None:
        self._follower.close()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()


def test_reads_appends_beats_and_signals_share_one(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        hearing = Hearing(ledger)
        try:
            claim = ledger.open_run("r1")
            member = ledger.join(LINE, "r0", FACTS)
            ledger.beat(member, 1)
            ledger.view(LINE)
            until_connections(postgres_url, 2)  # one of each Ledger
            while hearing.heard.acquire(timeout=0.2):
                pass  # its own appends
            other.reserve(claim)
            assert hearing.heard.acquire(timeout=WITHIN_S)
        finally:
            hearing.end()
    until_connections(postgres_url, 0)


def test_who_wants_no_details_hears_only_what_may_change_a_desired_set(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        claim = other.open_run("r1")
        member = other.join(LINE, "r0", FACTS)
        everything, desired = Hearing(ledger), Hearing(ledger, details=False)
        try:
            while everything.heard.acquire(timeout=0.2):
                pass
            version = publish(other, claim)
            assert desired.heard.acquire(timeout=WITHIN_S)
            while desired.heard.acquire(timeout=0.2) or everything.heard.acquire(timeout=0.2):
                pass
            other.fetched(member, version.version, version.digest)
            assert everything.heard.acquire(timeout=WITHIN_S)
            assert not desired.heard.acquire(timeout=0.2)
            acknowledge(other, member, version)  # the only replica: so it becomes current
            assert desired.heard.acquire(timeout=WITHIN_S)
        finally:
            everything.end()
            desired.end()


def test_two_listeners_of_one_process_both_hear(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        both = [Hearing(ledger), Hearing(ledger)]
        try:
            for hearing in both:
                while hearing.heard.acquire(timeout=0.2):
                    pass
            other.open_run("r1")
            assert all(hearing.heard.acquire(timeout=WITHIN_S) for hearing in both)
        finally:
            for hearing in both:
                hearing.end()


def test_a_signal_that_arrives_during_a_long_read_is_heard_after_it(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        hearing = Hearing(ledger)
        try:
            with ledger.projections() as reading:
                other.open_run("r1")
                assert reading.last_rollout() == 0
            assert hearing.heard.acquire(timeout=WITHIN_S)
        finally:
            hearing.end()


def test_who_finds_it_busy_gets_another_which_does_not_stay(postgres_url: str) -> None:
    """A heart beats while an append of the same process waits for somebody's lock."""
    with Ledger(postgres_url) as ledger:
        member = ledger.join(LINE, "r0", FACTS)
        with transaction(postgres_url) as blocker:
            blocker.exec_driver_sql("SELECT * FROM head FOR UPDATE")
            append = threading.Thread(target=lambda: ledger.fetched(member, 1, "d" * 64))
            append.start()
            while (
                blocker.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar()
                == 0
            ):
                pass
            began = time.monotonic()
            ledger.beat(member, 1)
            assert time.monotonic() - began < PATIENCE_S + WITHIN_S / 4
            blocker.rollback()
        append.join(WITHIN_S)
        assert ledger.heartbeats(LINE) == {"r0": (1, 1)}
        until_connections(postgres_url, 1)


def test_many_threads_end_with_one(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger:
        ledger.open_run("r1")
        together = threading.Barrier(3 * MAX_EXTRA)

        def ask() -> None:
            together.wait()
            for _ in range(5):
                ledger.view(LINE)

        threads = [threading.Thread(target=ask) for _ in range(3 * MAX_EXTRA)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        until_connections(postgres_url, 1)


def test_the_pool_is_made_for_one_ledger(postgres_url: str) -> None:
    engine = connect.connect_shared(connect.ledger_url(postgres_url))
    with engine.connect() as connection:
        assert connection.execute(sa.text("SHOW lock_timeout")).scalar() == "10s"
        assert "in use" in engine.pool.status()
    assert "free" in engine.pool.status()
    engine.dispose()
    until_connections(postgres_url, 0)
