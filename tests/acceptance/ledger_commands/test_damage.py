"""A ledger that was damaged: what says so, and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db import schema
from tests.acceptance.ledger_commands.command import Command, MakeUrl, expect, head_of
from tests.behind_the_back import forge, run_sql
from tests.ledger_builders import LINE


def test_a_damaged_row_is_named_by_whoever_reads_it(run: Command, own: str) -> None:
    """Verify shows it with all that follows from it, others stop there with one line."""
    forge(own, "UPDATE events SET payload = '{\"' WHERE seq = 7")
    readers = ["events", "events --json", "replay r1", "as-of 20 --json"]
    for command, done in run.all(own, readers).items():
        assert done.returncode == 1, command
        assert done.stderr.startswith("policyline: event 7 ("), done.stderr
        assert "unreadable payload" in done.stderr
        assert done.stderr.count("\n") == 1
    expect(run(own, "repair-projections"), 1, "does not hold at event 7; nothing was rebuilt")
    found = json.loads(run(own, "verify", "--json").stdout)
    assert found["ok"] is False
    said = {(problem["seq"], problem["what"]) for problem in found["problems"]}
    assert (7, "event 7 was changed: its hash does not match") in said


@pytest.mark.parametrize(
    ("statement", "seq", "says"),
    [
        ("DELETE FROM events WHERE seq = 9", 9, "event 9 is missing"),
        ("UPDATE events SET actor = 'x' WHERE seq = 9", 9, "event 9 was changed"),
        ("UPDATE events SET prev_hash = hash WHERE seq = 9", 9, "event 9 does not follow"),
        ("DELETE FROM events WHERE seq > 50", 51, "the chain ends at 50: events were cut off"),
    ],
)
def test_a_broken_chain_is_found_and_the_place_is_named(
    run: Command, own: str, statement: str, seq: int, says: str
) -> None:
    forge(own, statement)
    done = run(own, "verify", "--json")
    assert done.returncode == 1
    problems = json.loads(done.stdout)["problems"]
    assert any(p["seq"] == seq and says in p["what"] for p in problems), problems
    table = run(own, "verify")
    assert (table.returncode, table.stderr) == (1, "")
    assert says in table.stdout
    assert "does not add up" in table.stdout
    assert "remedy: restore a backup: docs/backup.md" in table.stdout


@pytest.mark.parametrize("table", sorted({*schema.metadata.tables, "alembic_version"}))
def test_a_table_that_is_gone_is_damage_and_named(run: Command, own: str, table: str) -> None:
    run_sql(own, f"DROP TABLE {table}")
    done = run(own, "verify")
    assert done.returncode == 1, done.stderr
    if table in {"head", "alembic_version"}:  # without these no ledger can be opened
        expect(done, 1, f"table {table}", "restore it from a backup")
    else:
        assert f"problem: table {table} is missing\nremedy: restore" in done.stdout
    expect(run(own, "upgrade"), 1, "is damaged", f"table {table}", "restore it from a backup")
    if table in {"head", "versions", "lines", "replicas", "alembic_version"}:
        expect(run(own, "status"), 1, "is damaged", f"table {table}", "restore it from a backup")


def test_phases_without_their_event_are_found(run: Command, own: str) -> None:
    with Ledger(own) as ledger:
        (published,) = ledger.events(version=8, kinds=("version_published",))
        (reserved,) = ledger.events(version=8, kinds=("version_reserved",))
    columns = "INSERT INTO phases (seq, line, run, version, source, phase, duration_s) VALUES"
    rest = "'publisher', 'save', 0.5"
    run_sql(own, f"{columns} ({published.seq}, '{LINE}', 'r1', 8, {rest})")
    assert run(own, "verify").returncode == 0
    wrong = [
        (9999, LINE, "r1", 8),  # no such event
        (reserved.seq, LINE, "r1", 8),  # one that brings no phases
        (published.seq, LINE, "r1", 7),  # of another version
        (published.seq, "other", "r1", 8),  # of another line
        (published.seq, LINE, "r2", 8),  # of another run
    ]
    run_sql(own, *(f"{columns} ({s}, '{li}', '{r}', {v}, {rest})" for s, li, r, v in wrong))
    done = run(own, "verify")
    assert done.returncode == 1
    for number, (seq, line, _, version) in enumerate(wrong, start=2):
        what = f"row {number} of phases: no event {seq} published or acked {line}-v{version}"
        assert what in done.stdout
    assert "does not add up: 5 problems" in done.stdout


def test_a_projection_that_contradicts_itself_has_a_remedy(run: Command, own: str) -> None:
    run_sql(own, "UPDATE lines SET current = 77")
    for command in ("status", "versions"):
        expect(run(own, command), 1, "names trl-policy-v77 as its current", "repair-projections")
    told = run(own, "verify").stdout
    assert "remedy: once the events hold, run: policyline ledger repair-projections" in told
    assert run(own, "repair-projections").returncode == 0
    assert run(own, "status").returncode == 0


def test_what_is_wrong_with_an_export_is_named_with_its_line(
    run: Command, lived: str, new_ledger: MakeUrl, tmp_path: Path
) -> None:
    """Lines count from 1, and the first is the header: event 9 is on line 10."""
    url, file = new_ledger(), tmp_path / "run.jsonl"
    whole = run(lived, "export -").stdout
    rows = whole.splitlines(keepends=True)
    with Ledger(lived) as ledger:
        last = ledger.head()[0]
    wrong = {
        "".join([*rows[:9], rows[9].replace("tester", "intruder"), *rows[10:]]): "line 10: event 9",
        "".join([*rows[:9], *rows[10:]]): "line 10: event 10 does not continue the chain after",
        "".join([*rows[:9], "garbage\n", *rows[10:]]): "line 10 is not a line of an export",
        "".join(rows[:30])[:-40]: "line 30 is not a line of an export",
        "".join(rows[:30]): f"ends at event 29, its header promises {last}: it was cut off",
        "".join(rows[:-1]): "holds 1 rollouts, its header promises 2: it was cut off",
    }
    for text, says in wrong.items():
        file.write_text(text)
        expect(run(url, f"import {file}"), 1, says, "take another copy of the file")
    file.write_text("")
    expect(run(url, f"import {file}"), 1, "is not an export", "policyline ledger export FILE")
    assert head_of(url) == 0
    file.write_text(whole)
    assert run(url, f"import {file}").returncode == 0
    assert head_of(url) == last
