"""Slips of the pen, and what the ledger refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from policyline.ledger.db.migrate import upgrade_url
from tests.acceptance.ledger_commands.command import Command, MakeUrl, expect, fill, head_of

USAGE = {
    "events --run nope": "run 'nope' is not in this ledger (newest: r1)",
    "replay nope": "run 'nope' is not in this ledger",
    "phases --run nope": "run 'nope' is not in this ledger",
    "versions --run nope": "run 'nope' is not in this ledger",
    "rollouts --run nope": "run 'nope' is not in this ledger",
    "close-run nope": "run 'nope' is not in this ledger",
    "open-run r9 --parent-run nope": "parent run 'nope' is not in this ledger",
    "open-run r9 --parent-run r1 --parent-version 99": "has not published trl-policy-v99",
    "status --line nope": "line 'nope' is not in this ledger (there are: trl-policy)",
    "versions --line No!": "line 'No!' is not usable",
    "audit 99": "trl-policy-v99 is not in this ledger",
    "audit ffffffff": "no version has a digest that starts with ffffffff",
    "pin 99": "trl-policy-v99 is not published",
    "retry 99": "trl-policy-v99 is not published",
    "retry 8 --replica r9": "replica 'r9' is not in this ledger; run: policyline ledger status",
    "withdraw 99 --reason x": "trl-policy-v99 is not published",
    "rollback --to 99 --reason x": "trl-policy-v99 is not published",
    "versions --diff 1 99": "trl-policy-v99 is not in this ledger",
    "audit x!": "'x!' is no version of line 'trl-policy', no digest",
    "audit other-v1": "write 7 or trl-policy-v7",
    "pin 0": "version '0' is neither",
    "pin 99999999999999999999999": "is neither a number nor a name",
    "audit ²": "'²' is no version of line",
    "as-of yesterday": "'yesterday' is neither an event number nor a time; write a number",
    "as-of 12:99": "neither an event number nor a time",
    "as-of ²": "neither an event number nor a time",
    "as-of 0001-01-01T00:00:00+14:00": "neither an event number nor a time",
    "as-of 2020-01-01": "the ledger has no event at or before",
    "as-of 99999": "event 99999 does not exist",
    "rollouts --since soon": "'soon' is neither",
    "events --from 0": "--from",
    "events --from 9 --to 3": "--from 9 comes after --to 3; swap them",
    "replay r1 --from 9 --to 3": "--from 9 comes after --to 3; swap them",
    "events --from 99999999999999999999999": "--from",
    "rollouts --min-staleness 99999999999999999999999": "--min-staleness",
    "open-run r9 --candidate-timeout inf": "--candidate-timeout",
    "open-run r9 --ready-grace nan": "--ready-grace",
    "open-run r9 --max-staleness 99999999999999999999999": "--max-staleness",
    "open-run r9 --min-ready some": "'some' is not a number of replicas, 1 to 1000000, or 'all'",
    "open-run r9 --min-ready ²": "'²' is not a number of replicas",
    "open-run no/slash": "run 'no/slash' is not usable",
    "export /nowhere/x.jsonl": "/nowhere/x.jsonl cannot be written: No such file or directory",
    "export /dev/null": "/dev/null exists; remove it, or name another file",
    "import /nowhere/x.jsonl": "/nowhere/x.jsonl cannot be read: No such file or directory",
    "nonsense": "No such command",
}


@pytest.mark.timeout(180)
def test_a_slip_of_the_pen_is_a_usage_error_and_changes_nothing(
    run: Command, tmp_path: Path
) -> None:
    url = str(tmp_path / "ledger.db")
    upgrade_url(url)
    fill(url)
    head = head_of(url)
    for command, done in run.all(url, list(USAGE)).items():
        expect(done, 2, USAGE[command])
    assert head_of(url) == head
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == []


def test_a_digit_of_another_script_is_no_number_on_postgres_either(
    run: Command, new_ledger: MakeUrl
) -> None:
    url = new_ledger()
    for command in ("pin 99999999999999999999999", "events --from 99999999999999999999999"):
        expect(run(url, command), 2)


REFUSED = {
    "open-run r1": "run 'r1' is closed; open a new run, with it as parent",
    "open-run r9 --parent-version 3": "parent version 3 has no parent run; name the run too",
    "withdraw 8 --reason x": "trl-policy-v8 is current; run: policyline ledger rollback",
    "rollback --to 8 --reason x": "is of run 'r1', open is None; open a run with --parent-run r1",
    "import -": "the text is not an export of a ledger",
}


def test_what_the_ledger_refuses_is_exit_1(run: Command, own: str) -> None:
    assert run(own, "close-run", "r1").returncode == 0
    head = head_of(own)
    for command, done in run.all(own, list(REFUSED)).items():
        expect(done, 1, REFUSED[command])
    assert head_of(own) == head
