"""What a database may hold although no ledger writes it: named, never a traceback."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db import schema
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.errors import Corrupted
from policyline.ledger.read.verify import verify
from policyline.ledger.transfer import export, repair_projections
from tests.behind_the_back import forge, run_sql
from tests.integration.ledger.test_queries import live, rollout
from tests.ledger_builders import LINE

STRANGE = ("x'00ff'", "'zz'", "NULL", "1.5", "-1")
"""SQLite keeps a value of any type in (nearly) any column."""
UNCHECKED = {
    ("head", "ledger_id"),  # known from what is beside the database: `verify --storage`
    ("heartbeats", "*"),
    ("phases", "*"),
    ("rollouts", "id"),
    ("head", "id"),
}
"""What `docs/ledger.md` says that verify cannot know."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "ledger.db"
    upgrade_url(str(path))
    with Ledger(str(path)) as ledger:
        live(ledger, 4)
        ledger.record_rollouts(LINE, "b1", [rollout(1, 1), rollout(2, 3)])
    forge(str(path))
    return path


@pytest.mark.parametrize("table", ["head", "events", "rollouts", *map(str, schema.PROJECTIONS)])
def test_a_value_of_any_type_in_any_column_is_a_problem_that_is_named(
    whole: Path, tmp_path: Path, table: str
) -> None:
    by_row = {str(kind): known.name for kind, known in schema.PROJECTIONS.items()}
    name = by_row.get(table, table)
    for column in (c.name for c in schema.metadata.tables[name].columns):
        if (name, column) in UNCHECKED:
            continue
        for value in STRANGE:
            damaged = tmp_path / "damaged.db"
            with closing(sqlite3.connect(whole)) as source, closing(sqlite3.connect(damaged)) as to:
                source.backup(to)
                row = f"(SELECT max(rowid) FROM {name})"
                change = f"UPDATE {name} SET {column} = {value} WHERE rowid = {row}"
                try:
                    before = to.execute(f"SELECT {column} FROM {name} WHERE rowid = {row}")
                    was = before.fetchone()
                    to.execute(change)
                    now = to.execute(f"SELECT {column} FROM {name} WHERE rowid = {row}").fetchone()
                except sqlite3.IntegrityError:
                    continue  # the database itself refuses it
                if was == now and type(was[0]) is type(now[0]):
                    continue
                to.commit()
            with Ledger(str(damaged)) as ledger:
                assert not verify(ledger).ok, change
            damaged.unlink()


def test_the_heads_time_is_the_last_events(ledger: Ledger, ledger_url: str) -> None:
    """Else every later event would inherit it."""
    live(ledger, 2)
    run_sql(ledger_url, "UPDATE head SET recorded_at = '2999-01-01T00:00:00.000000+00:00'")
    (problem,) = verify(ledger).problems
    assert "2999" in problem.what
    assert "repair-projections" in problem.remedy
    repair_projections(ledger)
    assert verify(ledger).ok
    ledger.pause(LINE, "after it")
    assert verify(ledger).ok


def test_a_head_whose_time_is_none_takes_no_event(ledger_url: str) -> None:
    with Ledger(ledger_url) as ledger:
        live(ledger, 2)
    run_sql(ledger_url, "UPDATE head SET recorded_at = 'zz'")
    with Ledger(ledger_url) as ledger:
        head = ledger.head()
        with pytest.raises(Corrupted, match=r"'zz'.*repair-projections"):
            ledger.pause(LINE, "a test")
        assert ledger.head() == head


@pytest.mark.parametrize(
    ("statement", "seq"),
    [
        ("UPDATE events SET actor = 'somebody' WHERE seq = 7", 7),
        ("DELETE FROM events WHERE seq = 7", 7),
        ("DELETE FROM events WHERE seq > 9", 10),
    ],
)
def test_nothing_is_rebuilt_from_a_chain_that_does_not_hold(
    ledger: Ledger, ledger_url: str, statement: str, seq: int
) -> None:
    live(ledger, 3)
    forge(ledger_url, statement, "UPDATE lines SET current = 1")
    with pytest.raises(Corrupted, match=f"at event {seq}|ends at {seq - 1}") as refused:
        repair_projections(ledger)
    assert refused.value.seq == seq
    assert ledger.view(LINE).current == 1


def test_an_export_of_what_no_ledger_writes_names_it(whole: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    shutil.copy(whole, damaged)
    run_sql(str(damaged), "UPDATE events SET actor = x'00ff' WHERE seq = 7")
    with Ledger(str(damaged)) as ledger, pytest.raises(Corrupted, match=r"event .*7.*verify"):
        list(export(ledger))


def test_a_phase_without_a_duration_is_named(whole: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    shutil.copy(whole, damaged)
    run_sql(
        str(damaged),
        "INSERT INTO phases (seq, line, run, version, source, phase, duration_s) "
        f"VALUES (3, '{LINE}', 'r1', 1, 'r0', 'load', 'zz')",
    )
    with Ledger(str(damaged)) as ledger, pytest.raises(Corrupted, match="'zz', which is no number"):
        ledger.phases(run="r1")


def test_a_ledger_without_its_schemas_revision_is_damaged(ledger_url: str) -> None:
    run_sql(ledger_url, "DELETE FROM alembic_version")
    for attempt in (Ledger, upgrade_url):
        with pytest.raises(Corrupted, match=r"revision of its schema.*backup"):
            attempt(ledger_url)
