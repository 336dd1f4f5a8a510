"""What breaks under a live ledger: replies, connections, single writes, the server."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db.append_lock import take_lock
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.errors import Conflict, LedgerError, LedgerUnavailable, StaleGeneration
from policyline.ledger.read.verify import verify
from policyline.ledger.rollouts import RolloutFilter
from tests.behind_the_back import run_sql, transaction
from tests.integration.ledger.cutting_proxy import CuttingProxy
from tests.integration.ledger.test_concurrency import wait_until_blocked
from tests.integration.ledger.test_queries import rollout
from tests.ledger_builders import FACTS, LINE, manifest_for, publish

WITHIN_S = 30.0
BREAK_COMMITS = {
    "sqlite": [
        "CREATE TRIGGER broken BEFORE UPDATE ON head BEGIN SELECT RAISE(ABORT, 'a test'); END"
    ],
    "postgresql": [
        """
        CREATE FUNCTION break_commit() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'a test'; END $$
        """,
        """
        CREATE TRIGGER broken BEFORE UPDATE ON head
        FOR EACH ROW EXECUTE FUNCTION break_commit()
        """,
    ],
}


# a reply that is lost


@pytest.fixture
def proxy(own_url: str) -> Iterator[CuttingProxy]:
    """Between a ledger and its server."""
    with CuttingProxy(own_url) as running:
        yield running


def test_a_retry_after_a_lost_reply_is_the_same_append(proxy: CuttingProxy, own_url: str) -> None:
    """The server has committed; the client never hears of it, and asks again."""
    with Ledger(own_url) as direct, Ledger(proxy.url) as ledger:
        claim = ledger.open_run("r1")
        manifest = manifest_for(direct.reserve(claim, attempt="a1"))
        verbs: list[Callable[[], object]] = [
            lambda: ledger.reserve(claim, attempt="a2"),
            lambda: ledger.publish(claim, manifest, phases={"save": 0.5}),
            lambda: ledger.record_rollouts(LINE, "b1", [rollout(1, 1), rollout(2, 1)]),
        ]
        for number, verb in enumerate(verbs):
            before = direct.head()[0]
            proxy.cut_after_the_next_commit()
            with pytest.raises(LedgerUnavailable):
                verb()
            committed = direct.head()[0]
            assert committed > before
            answer = verb()
            assert verb() == answer
            assert direct.head()[0] == committed, f"verb {number} was doubled"
        assert [p.duration_s for p in direct.phases(run="r1")] == [0.5]
        assert len(list(direct.rollouts(RolloutFilter()))) == 2
        with pytest.raises(Conflict):
            ledger.record_rollouts(LINE, "b1", [rollout(3, 1)])
        assert verify(direct).problems == ()


def test_a_writer_killed_after_its_commit_has_written_once(ledger_url: str) -> None:
    """The same loss where the writer does not live to ask again; its successor does."""
    program = (
        "import os, signal, sys; from ledger import Claim, Ledger\n"
        "with Ledger(sys.argv[1]) as ledger:\n"
        "    ledger.reserve(Claim('trl-policy', 'r1', 1), attempt='a1')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Ledger(ledger_url) as ledger:
        claim = ledger.open_run("r1")
        died = subprocess.run([sys.executable, "-c", program, ledger_url], check=False)
        assert died.returncode == -signal.SIGKILL
        head = ledger.head()
        assert ledger.reserve(claim, attempt="a1").version == 1
        assert ledger.head() == head


# connections and transactions that end


def test_connections_that_the_server_closed_meanwhile_are_replaced(postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger:
        claim = ledger.open_run("r1")
        member = ledger.join(LINE, "r0", FACTS)
        verbs: list[Callable[[], object]] = [
            lambda: ledger.reserve(claim),
            lambda: ledger.view(LINE),
            lambda: ledger.beat(member, 1),
            lambda: ledger.declare_lost(LINE, "r0", generation=1, counter=0, reason="silent"),
        ]
        for verb in verbs:
            run_sql(
                postgres_url,
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()",
            )
            verb()


def test_a_writer_that_dies_with_the_lock_leaves_neither_lock_nor_rows(
    ledger_url: str, ledger: Ledger
) -> None:
    ledger.open_run("r1")
    program = (
        "import os, signal, sys; from ledger import Ledger\n"
        "with Ledger(sys.argv[1]) as ledger, ledger.exclusive() as connection:\n"
        "    connection.exec_driver_sql('UPDATE lines SET paused = true')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", program, ledger_url], check=False)
    assert died.returncode == -signal.SIGKILL
    assert ledger.head()[0] == 1
    assert ledger.pause(LINE, "mine")
    assert verify(ledger).problems == ()


def test_a_commit_that_fails_half_way_leaves_nothing(ledger_url: str, ledger: Ledger) -> None:
    claim = ledger.open_run("r1")
    reservation = ledger.reserve(claim)
    head, view = ledger.head(), ledger.view(LINE, also=[1])
    run_sql(ledger_url, *BREAK_COMMITS[ledger._engine.dialect.name])
    verbs: list[Callable[[], object]] = [
        lambda: ledger.publish(claim, manifest_for(reservation), phases={"save": 1.0}),
        lambda: ledger.record_rollouts(LINE, "b1", [rollout(1, 1)]),
        lambda: ledger.join(LINE, "r0", FACTS),
    ]
    for verb in verbs:
        with pytest.raises(LedgerError, match="a test"):
            verb()
    assert ledger.head() == head
    assert ledger.view(LINE, also=[1]) == view
    assert (ledger.phases(), ledger.heartbeats(LINE)) == ([], {})
    assert list(ledger.rollouts(RolloutFilter())) == []


# heartbeats, which take no lock


# the file that is not there any more


def test_a_file_that_was_removed_takes_no_append_and_goes_on_once_it_is_back(
    sqlite_url: str, tmp_path: Path
) -> None:
    files = [Path(sqlite_url + end) for end in ("", "-wal", "-shm")]
    with Ledger(sqlite_url) as opened:
        claim = opened.open_run("r1")
        publish(opened, claim)
        there = [file for file in files if file.exists()]
        for file in there:
            file.rename(tmp_path / f"away-{file.name}")

        for verb in (lambda: publish(opened, claim), lambda: opened.view(LINE)):
            with pytest.raises(LedgerUnavailable, match="was removed while this process"):
                verb()

        for file in there:
            (tmp_path / f"away-{file.name}").rename(file)
        assert publish(opened, claim).version == 2
    with Ledger(sqlite_url) as reopened:
        assert verify(reopened).problems == ()


def test_a_file_that_was_replaced_is_not_taken_for_the_one_that_was_opened(
    sqlite_url: str, tmp_path: Path
) -> None:
    with Ledger(sqlite_url) as opened:
        opened.open_run("r1")
        other = tmp_path / "other.db"
        upgrade_url(str(other))
        other.rename(sqlite_url)

        with pytest.raises(LedgerUnavailable, match="replaced by another file"):
            opened.view(LINE)


def test_one_that_beats_while_it_is_declared_lost_is_not_lost(postgres_url: str) -> None:
    """The observer has seen the old counter, and waits for the lock when the heart beats."""
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        ledger.open_run("r1")
        member = ledger.join(LINE, "r0", FACTS)
        said: list[bool] = []

        def declare() -> None:
            said.append(ledger.declare_lost(LINE, "r0", generation=1, counter=0, reason="silent"))

        observer = threading.Thread(target=declare)
        with transaction(postgres_url) as blocker:
            take_lock(blocker)
            observer.start()
            wait_until_blocked(postgres_url)
            other.beat(member, 1)
            blocker.rollback()
        observer.join(WITHIN_S)
        assert said == [False]
        assert ledger.view(LINE).replicas["r0"].state == "joined"
        assert ledger.heartbeats(LINE) == {"r0": (1, 1)}


def test_a_late_beat_of_a_fenced_watcher_does_not_speak_for_the_new_one(postgres_url: str) -> None:
    """It waits for the row that the newer watcher's joining writes."""
    with Ledger(postgres_url) as ledger, Ledger(postgres_url) as other:
        old = ledger.join(LINE, "r0", FACTS)
        refused: list[BaseException] = []

        def beat() -> None:
            try:
                other.beat(old, 7)
            except StaleGeneration as error:
                refused.append(error)

        late = threading.Thread(target=beat)
        with transaction(postgres_url) as joining:
            joining.exec_driver_sql("UPDATE replicas SET generation = 2")
            joining.exec_driver_sql("UPDATE heartbeats SET generation = 2, counter = 0")
            late.start()
            wait_until_blocked(postgres_url)
            joining.commit()
        late.join(WITHIN_S)
        assert len(refused) == 1
        assert ledger.heartbeats(LINE) == {"r0": (2, 0)}
