"""How the ledger treats its database: schema, settings, concurrency, errors."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from policyline import migrations
from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.db import connect as connections
from policyline.ledger.db import database, schema
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.errors import (
    Corrupted,
    InvalidName,
    InvalidUrl,
    LedgerUnavailable,
    SchemaMismatch,
)
from policyline.ledger.read.verify import verify
from policyline.ledger.rollouts import RolloutFilter
from tests.behind_the_back import run_sql
from tests.integration.ledger.test_queries import rollout
from tests.ledger_builders import FACTS, LINE, publish


def test_there_is_one_head_and_it_is_the_one_this_release_needs() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_heads() == [schema.SCHEMA_REVISION]


def test_the_migrated_schema_equals_the_metadata(ledger_url: str) -> None:
    engine = connections.connect(connections.ledger_url(ledger_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_upgrading_again_changes_nothing(ledger_url: str) -> None:
    assert upgrade_url(ledger_url) == (schema.SCHEMA_REVISION, schema.SCHEMA_REVISION)


def test_a_ledger_that_was_never_upgraded_names_the_remedy(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.db")
    with pytest.raises(LedgerUnavailable, match=r"does not exist.*ledger upgrade"):
        Ledger(missing)
    assert not Path(missing).exists()
    empty = tmp_path / "empty.db"
    sqlite3.connect(empty).close()
    empty.touch()
    with pytest.raises(SchemaMismatch, match=r"no schema.*ledger upgrade"):
        Ledger(str(empty))


def test_a_newer_schema_is_refused(ledger_url: str) -> None:
    run_sql(ledger_url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaMismatch, match="newer"):
        Ledger(ledger_url)
    with pytest.raises(SchemaMismatch, match="newer"):
        upgrade_url(ledger_url)


def test_a_file_that_is_no_database_is_an_error_of_ours(tmp_path: Path) -> None:
    nonsense = tmp_path / "x.db"
    nonsense.write_text("this is not a database, whatever its name says" * 100)
    with pytest.raises(Corrupted, match=r"x\.db.*not a database"):
        Ledger(str(nonsense))


def test_a_url_of_another_database_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidUrl, match="postgresql://"):
        Ledger("mysql://x/y")


def test_sqlite_connections_are_durable_and_in_wal_mode(sqlite_url: str) -> None:
    with Ledger(sqlite_url) as ledger, ledger._engine.connect() as connection:
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert values == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_time_never_goes_back_in_the_ledger(ledger_url: str) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    times = iter([noon, noon - timedelta(hours=1), noon + timedelta(seconds=1)])
    with Ledger(ledger_url, clock=lambda: next(times)) as ledger:
        claim = ledger.open_run("r1")
        ledger.reserve(claim)
        ledger.reserve(claim)
        recorded = [e.recorded_at for e in ledger.events()]
    assert recorded == sorted(recorded)
    assert recorded[1] == recorded[0]


def test_names_are_checked_before_anything_is_written(ledger: Ledger) -> None:
    with pytest.raises(InvalidName):
        ledger.open_run("../x")
    with pytest.raises(InvalidName):
        ledger.join(LINE, "a/b", FACTS)
    assert ledger.head()[0] == 0


def test_a_writer_that_cannot_get_the_lock_says_so(
    ledger_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.05)
    with ledger._appending():
        with Ledger(ledger_url) as impatient, pytest.raises(LedgerUnavailable, match="lock"):
            impatient.open_run("r1")
        with Ledger(ledger_url) as reader:
            assert reader.runs() == []
    assert ledger.head()[0] == 0


def test_a_commit_wakes_a_reader_that_then_sees_it(ledger_url: str, ledger: Ledger) -> None:
    woken = threading.Event()
    ready = threading.Event()
    heads: list[int] = []

    def follow() -> None:
        with Ledger(ledger_url) as reader:
            follower = reader.follow(poll_s=None)
            ready.set()
            for _ in follower:
                heads.append(reader.head()[0])
                if heads[-1] >= 2:
                    woken.set()
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    assert ready.wait(5)
    claim = ledger.open_run("r1")
    publish(ledger, claim)
    while not woken.wait(0.2):
        ledger.reserve(claim)
    thread.join(5)
    assert heads[-1] >= 2


def test_a_heartbeat_wakes_nobody(sqlite_url: str) -> None:
    with Ledger(sqlite_url) as ledger:
        check_that_a_heartbeat_wakes_nobody(sqlite_url, ledger)


def check_that_a_heartbeat_wakes_nobody(ledger_url: str, ledger: Ledger) -> None:
    member = ledger.join(LINE, "r0", FACTS)
    signal_file = Path(f"{ledger_url}.signal")
    before = signal_file.stat().st_mtime_ns
    ledger.beat(member, 1)
    assert signal_file.stat().st_mtime_ns == before
    ledger.leave(member, "done")
    assert signal_file.stat().st_mtime_ns > before


def test_events_stream_in_pages(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PAGE_ROWS", 3)
    claim = ledger.open_run("r1")
    for _ in range(10):
        ledger.reserve(claim)
    assert [e.seq for e in ledger.events()] == list(range(1, 12))
    assert [e.seq for e in ledger.events(after=4, limit=5)] == [5, 6, 7, 8, 9]
    assert [e.version for e in ledger.events(version=3)] == [3]


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    url = connections.ledger_url("postgresql://user:hunter2@127.0.0.1:1/db")
    assert "hunter2" not in url.render_as_string(hide_password=True)
    assert isinstance(sa.make_url(url), sa.URL)


STRANGE = "a\0b \ud800 \udc00 \U0001f600 c"


def test_texts_that_no_database_can_keep_are_mended_the_same_way(ledger: Ledger) -> None:
    """An engine's message, a client's model name: nobody's request keeps an event from being."""
    ledger.open_run("r1")
    member = ledger.join(LINE, "r0", EngineFacts(STRANGE, STRANGE, 6), url=STRANGE)
    ledger.load_failed(member, 1, digest="0" * 64, reason=STRANGE, permanent=False)
    ledger.foreign_adapter_seen(member, STRANGE, STRANGE, STRANGE)
    ledger.leave(member, STRANGE)
    batch = [replace(rollout(1, 1), asked_name=STRANGE, episode=STRANGE)]
    event = ledger.record_rollouts(LINE, "b1", batch)
    assert ledger.record_rollouts(LINE, "b1", batch) == event
    mended = "a\ufffdb \ufffd \ufffd \U0001f600 c"
    (row,) = ledger.replicas(LINE)
    assert {row.incarnation, row.build, row.url, row.reason} == {mended}
    assert [r.episode for r in ledger.rollouts(RolloutFilter())] == [mended]
    assert [r.reason for r in ledger.residency(LINE)] == [mended]
    assert verify(ledger).problems == ()
