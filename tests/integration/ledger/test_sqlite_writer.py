"""The connection that appends to SQLite keep: one at a time, given up after an error."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db import connect as connections
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.db.sqlite_writer import WriteConnection
from policyline.ledger.errors import LedgerUnavailable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own.db"


@pytest.fixture
def opened() -> list[sqlite3.Connection]:
    return []


@pytest.fixture
def kept(path: Path, opened: list[sqlite3.Connection]) -> Iterator[WriteConnection]:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS facts (n INTEGER PRIMARY KEY)")
        opened.append(connection)
        return connection

    kept = WriteConnection(connect, timeout_s=0.2)
    yield kept
    kept.close()


def _facts(path: Path) -> list[int]:
    with sqlite3.connect(path) as reader:
        return [n for (n,) in reader.execute("SELECT n FROM facts ORDER BY n")]


def _add(kept: WriteConnection, number: int) -> None:
    with kept.transaction() as connection:
        connection.execute("INSERT INTO facts VALUES (?)", [number])
        connection.execute("COMMIT")


def _add_twice(kept: WriteConnection, between: Exception | None = None) -> None:
    with kept.transaction() as connection:
        connection.execute("INSERT INTO facts VALUES (1)")
        if between is not None:
            raise between
        connection.execute("INSERT INTO facts VALUES (1)")


def test_one_connection_serves_all_transactions(
    kept: WriteConnection, path: Path, opened: list[sqlite3.Connection]
) -> None:
    _add(kept, 1)
    _add(kept, 2)
    assert _facts(path) == [1, 2]
    assert len(opened) == 1


def test_what_is_not_committed_is_rolled_back(
    kept: WriteConnection, path: Path, opened: list[sqlite3.Connection]
) -> None:
    with pytest.raises(KeyError):
        _add_twice(kept, KeyError())
    with kept.transaction() as connection:
        connection.execute("INSERT INTO facts VALUES (2)")
    _add(kept, 3)
    assert _facts(path) == [3]
    assert len(opened) == 1


def test_an_error_of_the_driver_costs_the_connection_and_nothing_else(
    kept: WriteConnection, path: Path, opened: list[sqlite3.Connection]
) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        _add_twice(kept)
    _add(kept, 2)
    assert _facts(path) == [2]
    assert len(opened) == 2
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")


def test_threads_take_turns_and_one_that_waits_too_long_is_told(kept: WriteConnection) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with kept.transaction():
            inside.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert inside.wait(10)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            _add(kept, 1)
    finally:
        leave.set()
        holder.join()
    _add(kept, 1)


def test_another_process_that_holds_the_lock_is_waited_for_no_longer_than_said(
    kept: WriteConnection, path: Path
) -> None:
    _add(kept, 1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        _add(kept, 2)
    other.close()
    _add(kept, 3)
    assert _facts(path) == [1, 3]


def test_closing_closes_what_is_in_use_when_it_is_free(
    kept: WriteConnection, opened: list[sqlite3.Connection]
) -> None:
    with kept.transaction() as connection:
        kept.close()
        connection.execute("INSERT INTO facts VALUES (1)")
        connection.execute("COMMIT")
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")


def test_a_ledger_goes_on_after_an_append_that_the_database_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "run.db")
    upgrade_url(url)
    with Ledger(url) as ledger, sqlite3.connect(url) as other:
        claim = ledger.open_run("r")
        # as a full disk would: the write fails in the middle of the transaction
        other.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON versions "
            "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
        )
        other.commit()
        before = ledger.head()
        with pytest.raises(Exception, match="full") as refused:
            ledger.reserve(claim)
        assert isinstance(refused.value, LedgerUnavailable) or "refused" in str(refused.value)
        assert ledger.head() == before
        other.execute("DROP TRIGGER refuse")
        other.commit()
        assert ledger.reserve(claim).version == 1


def test_a_ledgers_appends_are_durable(tmp_path: Path) -> None:
    url = str(tmp_path / "run.db")
    upgrade_url(url)
    engine = connections.connect(connections.ledger_url(url))
    kept = connections.connect_to_write(engine)
    with kept.transaction() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    kept.close()
    engine.dispose()
