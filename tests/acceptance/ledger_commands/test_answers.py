"""The command line itself, what it prints, and a run from its opening to its archive."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import typer

from policyline.cli import app
from policyline.demo.synthetic import write_adapter
from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.db.migrate import upgrade_url
from tests.acceptance.ledger_commands.command import Command, MakeUrl, expect, head_of
from tests.integration.ledger.test_queries import live
from tests.ledger_builders import FACTS, LINE, acknowledge, publish


def all_commands() -> dict[str, Any]:
    """Every command by its words."""

    def walk(command: Any, words: str) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{words} {name}")

    return dict(walk(typer.main.get_command(app), "policyline"))


def test_every_command_explains_itself_with_an_example() -> None:
    for words, command in all_commands().items():
        assert command.help, words
        assert "policyline" in (command.epilog or ""), f"{words}: no example in --help"


FILTERS = {
    "events": {"--from", "--to", "--run"},
    "phases": {"--run"},
    "replay": {"--from", "--to", "--versions"},
    "retry": {"--replica"},
    "rollouts": {
        *("--version", "--replica", "--run", "--since", "--until"),
        *("--min-staleness", "--limit", "--mixed"),
    },
    "versions": {"--run", "--diff"},
}
"""Options of `policyline ledger ...` that narrow what is asked: flags only."""


def test_every_option_but_a_filter_has_an_environment_variable() -> None:
    own = {f"policyline --{name}" for name in ("version", "install-completion", "show-completion")}
    missing = {
        f"{words} {option.opts[0]}"
        for words, command in all_commands().items()
        for option in command.params
        if option.param_type_name == "option" and option.name != "help" and not option.envvar
    }
    assert missing - own == {
        f"policyline ledger {words} {flag}" for words, flags in FILTERS.items() for flag in flags
    }


def test_an_option_from_the_environment_counts(run: Command, lived: str) -> None:
    done = run(lived, "versions", env={"POLICYLINE_JSON": "1"})
    assert [row["version"] for row in json.loads(done.stdout)] == list(range(1, 9))


def test_the_environment_narrows_no_answer(run: Command, lived: str) -> None:
    """A sidecar's or trainer's environment, in which an auditor asks."""
    names = {flag.lstrip("-").replace("-", "_").upper() for f in FILTERS.values() for flag in f}
    env = {f"POLICYLINE_{name}": "1" for name in names} | {
        "POLICYLINE_RUN": "r0",
        "POLICYLINE_REPLICA": "r9",
        "POLICYLINE_FROM": "5",
        "POLICYLINE_TO": "9",
        "POLICYLINE_DIFF": "1 2",
        "POLICYLINE_SINCE": "2099-01-01",
    }
    asked = ["events --json", "phases --json", "replay r1 --json", "rollouts --json"]
    asked += ["versions --json", "audit 3 --json", "verify --json"]

    plain, under_env = run.all(lived, asked), run.all(lived, asked, env=env)

    for command in asked:
        assert plain[command].returncode == 0
        assert under_env[command] == plain[command]


def one(text: str) -> Any:
    return json.loads(text)


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


PRINTS: dict[str, tuple[Callable[[str], Any], Callable[[Any], object]]] = {
    "runs --json": (one, lambda v: v[0]["run"] == "r1"),
    "versions --json": (one, lambda v: [r["version"] for r in v] == list(range(1, 9))),
    "versions --line trl-policy --json": (one, lambda v: v[2]["manifest"]["anchor"]["seq"] > 1),
    "versions --run r1 --json": (one, lambda v: v[7]["acked_by"] == ["r0", "r1"]),
    "versions --diff 1 v2 --json": (one, lambda v: {"field", "a", "b"} == v[0].keys()),
    "status --json": (one, lambda v: v["current"] == 8 and len(v["replicas"]) == 2),
    "phases --json": (one, lambda v: v == []),
    "audit 3 --json": (one, lambda v: v["versions"][0]["version"]["manifest"]["version"] == 3),
    "audit req-2 --json": (one, lambda v: v["rollout"]["version"] == 8),
    "audit chatcmpl-req-2 --json": (one, lambda v: v["rollout"]["version"] == 8),
    "as-of 20 --json": (one, lambda v: v["seq"] == 20 and v["served"]),
    "as-of 2099-01-01 --json": (one, lambda v: v["current"] == 8),
    "events --from 5 --to 9 --json": (lines, lambda v: [e["seq"] for e in v] == [5, 6, 7, 8, 9]),
    "replay r1 --json": (lines, lambda v: v[-1]["state"]["current"] == 8),
    "verify --json": (one, lambda v: v["ok"] is True and v["problems"] == []),
    "rollouts --json": (lines, lambda v: [r["request"] for r in v] == ["req-1", "req-2"]),
    "rollouts --format jsonl --version 8": (lines, lambda v: len(v) == 1),
    "rollouts --json --version v1 --replica r1": (lines, lambda v: v == []),
    "rollouts --json --run r1 --limit 1": (lines, lambda v: [r["request"] for r in v] == ["req-1"]),
    "rollouts --json --min-staleness 1": (lines, lambda v: [r["staleness"] for r in v] == [7]),
    "rollouts --json --since 2099-01-01": (lines, lambda v: v == []),
    "rollouts --json --until 2099-01-01": (lines, lambda v: len(v) == 2),
    "rollouts --format csv": (
        lambda text: list(csv.DictReader(StringIO(text))),
        lambda v: (
            [(r["request"], r["version"], r["staleness"]) for r in v]
            == [("req-1", "1", "7"), ("req-2", "8", "0")]
        ),
    ),
    "export -": (lines, lambda v: v[0]["format"] == "policyline-ledger/1"),
}


def test_json_is_json(run: Command, lived: str) -> None:
    for command, done in run.all(lived, list(PRINTS)).items():
        parse, right = PRINTS[command]
        assert (done.returncode, done.stderr) == (0, ""), command
        assert right(parse(done.stdout)), f"{command}\n{done.stdout}"


def test_tables_for_people(run: Command, lived: str) -> None:
    said = run.all(lived, ["status", "versions", "audit 8", "as-of 20", "rollouts", "events"])
    for command, done in said.items():
        assert (done.returncode, done.stderr) == (0, ""), command
        assert "trl-policy-v" in done.stdout or "r0" in done.stdout, done.stdout


def test_incarnations_are_shown_as_the_engine_writes_them(
    run: Command, new_ledger: MakeUrl
) -> None:
    """A number read and written again would lose digits, and another life would look the same."""
    url, incarnation = new_ledger(), "1.79598345612000001e+09"
    with Ledger(url) as ledger:
        claim = ledger.open_run("r1")
        member = ledger.join(LINE, "r0", EngineFacts(incarnation, "b", 6))
        acknowledge(ledger, member, publish(ledger, claim, "a"), incarnation=incarnation)
    commands = ["status", "audit 1", "as-of 2099-01-01", "events", "replay r1"]
    asked = [f"{command}{form}" for command in commands for form in ("", " --json")]
    for command, done in run.all(url, asked).items():
        shows = command != "replay r1 --json" or '"incarnation"' in done.stdout
        assert not shows or incarnation in done.stdout, f"{command}\n{done.stdout}"


def publishing(adapter: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: numpy does not survive the fork."""
    command = [sys.executable, "-m", "policyline", "publish", str(adapter), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_verification_says_what_it_has_read(run: Command, tmp_path: Path) -> None:
    url, storage, adapter = str(tmp_path / "l.db"), tmp_path / "s", tmp_path / "a"
    upgrade_url(url)
    storage.mkdir()
    write_adapter(adapter, seed=1)
    places = ["--run", "r1", "--ledger", url, "--storage", str(storage)]
    for _ in range(2):
        done = publishing(adapter, *places)
        assert done.returncode == 0, done.stderr
    found = json.loads(run(url, f"verify --storage {storage} --json").stdout)
    files = [f for v in storage.glob("trl-policy-v*") for f in v.iterdir()]
    hashed = [f for f in files if f.name != "manifest.json"]
    assert found["storage"] == {
        "versions": 2,
        "files": len(hashed),
        "size_bytes": sum(f.stat().st_size for f in hashed),
    }
    assert "in storage 2 versions, " in run(url, f"verify --storage {storage}").stdout
    hashed[0].write_bytes(b"x" * hashed[0].stat().st_size)
    changed = run(url, f"verify --storage {storage}")
    assert changed.returncode == 1
    assert "in storage 1 versions" in changed.stdout
    assert "remedy: put the version's directory back from a copy, or give it up" in changed.stdout

    number = hashed[0].parent.name.rpartition("v")[2]
    assert run(url, f"withdraw {number} --reason torn").returncode == 0
    given_up = run(url, f"verify --storage {storage}")
    assert (given_up.returncode, "in storage 1 versions" in given_up.stdout) == (0, True)
    shutil.rmtree(hashed[0].parent)
    assert run(url, f"verify --storage {storage}").returncode == 0

    (other,) = storage.glob("trl-policy-v*")
    (other / "old").mkdir()
    for name in ("notes.txt", "old/b", "old/c", "z"):
        (other / name).touch()
    surplus = run(url, f"verify --storage {storage}")
    assert surplus.returncode == 1
    assert "files that its manifest does not list: notes.txt, old/b, old/c and 1" in surplus.stdout
    assert "remedy: move such files out of the version's directory" in surplus.stdout
    assert "does not add up: 1 problems" in surplus.stdout
    not_there = run(url, f"verify --storage {adapter / 'adapter_config.json'}")
    expect(not_there, 3, "is not a directory; it is a file: name a directory")


def test_nothing_to_publish_is_a_usage_error_and_opens_no_run(tmp_path: Path) -> None:
    url, storage = str(tmp_path / "l.db"), tmp_path / "s"
    upgrade_url(url)
    storage.mkdir()
    places = ["--run", "r1", "--ledger", url, "--storage", str(storage)]
    done = publishing(tmp_path / "nope", *places)
    assert done.returncode == 2
    assert "does not exist" in " ".join(done.stderr.replace("│", " ").split())
    assert head_of(url) == 0


def test_a_reader_that_has_seen_enough_is_no_error(run: Command, lived: str) -> None:
    command = f"{sys.executable} -m policyline ledger replay r1 --json | head -n 1"
    env = os.environ | {"POLICYLINE_LEDGER": lived}
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, check=True, env=env
    )
    assert (len(lines(done.stdout)), done.stderr) == (1, "")


def test_a_run_from_its_opening_to_its_archive(
    run: Command, new_ledger: MakeUrl, tmp_path: Path
) -> None:
    url, other = new_ledger(), str(tmp_path / "archive.db")
    script = [
        ("upgrade", "is up to date"),
        ("open-run r1 --max-staleness 1 --min-ready all", "run r1 of line trl-policy is open"),
        ("pause --reason maintenance", "is to be paused"),
        ("pause --reason again", "was already to be paused"),
        ("resume", "is resumed"),
        ("resume", "was not paused"),
    ]
    for command, says in script:
        done = run(url, command)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert says in done.stdout
    with Ledger(url) as ledger:
        live(ledger, 6)
        claim = ledger.open_run("r1", take_over=True)
        member = ledger.join(LINE, "r1", FACTS)
        digest = ledger.version(LINE, 6).digest or ""
        ledger.load_failed(member, 6, digest=digest, reason="bad disk", permanent=True)
        ledger.release(claim)
    script = [
        ("retry 6 --replica r0", "version 6 is not rejected on replica r0"),
        ("retry v6", "version 6 is tried again on r1"),
        ("retry 6", "version 6 is not rejected on any replica"),
        ("pin 2 --serve", "version 2 is pinned and served"),
        ("unpin trl-policy-v2", "version 2 is not pinned"),
        ("withdraw 3 --reason bad", "version 3 is withdrawn"),
        ("rollback --to 4 --reason collapsed", "withdrawn: 5, 6; the publisher is fenced"),
        ("open-run r2 --parent-run r1 --parent-version 4", "run r2"),
        ("close-run r2", "run r2 is closed"),
        ("repair-projections", "projections rebuilt from"),
        (f"export {tmp_path}/r1.jsonl", ""),
        (f"upgrade --ledger {other}", "upgraded to"),
        (f"import {tmp_path}/r1.jsonl --ledger {other}", "imported"),
        (f"verify --ledger {other}", "adds up"),
    ]
    for command, says in script:
        done = run(url, command)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout
    with Ledger(url) as ledger, Ledger(other) as archive:
        assert archive.head() == ledger.head()
        assert archive.view(LINE) == ledger.view(LINE)
