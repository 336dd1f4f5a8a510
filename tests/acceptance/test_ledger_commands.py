"""`policyline ledger ...` as processes: what each prints, and says when something is wrong."""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

import pytest
import typer

from policyline.cli import app
from policyline.demo.synthetic import write_adapter
from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.db import schema
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.read.verify import verify
from tests.behind_the_back import forge, run_sql
from tests.forking import Commands, Done, commands
from tests.integration.ledger.test_queries import live, rollout
from tests.ledger_builders import FACTS, LINE, acknowledge, publish
from tests.postgres import PostgresServer, fresh_database, start_private

NOBODY = 65534


@pytest.fixture(scope="module")
def forking() -> Iterator[Commands]:
    """Runs commands as processes."""
    with commands() as running:
        yield running


class Command:
    """`policyline ledger ...`, with the ledger from the environment."""

    def __init__(self, forking: Commands) -> None:
        self._forking = forking

    def __call__(self, url: str, *args: str, **options: Any) -> Done:
        return self.all(url, [" ".join(args)], **options)[" ".join(args)]

    def all(
        self,
        url: str,
        many: Iterable[str],
        env: Mapping[str, str] | None = None,
        user: int | None = None,
    ) -> dict[str, Done]:
        """Several commands side by side; words are separated by blanks."""
        words = {text: ["ledger", *text.split()] for text in many}
        done = self._forking.run_all(
            list(words.values()), env={"POLICYLINE_LEDGER": url, **(env or {})}, user=user
        )
        return dict(zip(words, done, strict=True))


@pytest.fixture(scope="module")
def run(forking: Commands) -> Command:
    """Runs a ledger command."""
    return Command(forking)


def expect(done: Done, code: int, *parts: str) -> None:
    """One line on stderr, the code, and nothing on stdout."""
    told = f"{done.args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == code, told
    assert "Traceback" not in done.stderr, told
    one_line = done.stderr.startswith("policyline: ") and done.stderr.count("\n") == 1
    assert one_line or (code == 2 and done.stderr.startswith("Usage: ")), told
    said = " ".join(done.stderr.replace("│", " ").split())
    for part in parts:
        assert part in said, told


class MakeUrl(Protocol):
    def __call__(self) -> str: ...


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that may be stopped."""
    yield from start_private()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def new_ledger(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    server: PostgresServer,
) -> Iterator[MakeUrl]:
    """Makes upgraded, empty ledgers of one kind."""
    with ExitStack() as stack:

        def sqlite() -> str:
            url = str(tmp_path_factory.mktemp("ledger") / "ledger.db")
            upgrade_url(url)
            return url

        def postgres() -> str:
            return stack.enter_context(contextmanager(fresh_database)(server))

        yield sqlite if request.param == "sqlite" else postgres


def fill(url: str) -> None:
    with Ledger(url, actor="tester@here:1") as ledger:
        live(ledger, 8)
        ledger.record_rollouts(LINE, "b1", [rollout(1, 1), rollout(2, 8)])
        ledger.release(ledger.open_run("r1", take_over=True))


@pytest.fixture(scope="module")
def lived(new_ledger: MakeUrl) -> str:
    """A ledger with a history, which nobody changes."""
    url = new_ledger()
    fill(url)
    return url


@pytest.fixture
def own(new_ledger: MakeUrl) -> str:
    """A ledger with a history, to be damaged."""
    url = new_ledger()
    fill(url)
    return url


def head_of(url: str) -> int:
    with Ledger(url) as ledger:
        assert verify(ledger).problems == ()
        return ledger.head()[0]


# the command line itself


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


# what it prints


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


# a life on the command line


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


# usage


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


# damage


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


# a database that is not as it should be

READING = ["runs", "status --json", "events", "verify"]
APPENDING = ["open-run r9", "pin 8", "pause --reason x", "close-run r1"]


@pytest.mark.parametrize(("revision", "says"), [("9999", "newer"), ("0000", "ledger upgrade")])
def test_a_schema_behind_or_ahead(run: Command, own: str, revision: str, says: str) -> None:
    run_sql(own, f"UPDATE alembic_version SET version_num = '{revision}'")
    for done in run.all(own, ["status", "open-run r9", "verify", "export -"]).values():
        expect(done, 3, says, revision)
    if says == "newer":
        expect(run(own, "upgrade"), 3, "install the newer release of policyline")
    run_sql(own, "UPDATE alembic_version SET version_num = '0001'")
    head_of(own)


def test_a_database_without_a_schema(run: Command, tmp_path: Path, server: PostgresServer) -> None:
    (tmp_path / "empty.db").touch()
    with contextmanager(fresh_database)(server, "template1") as bare:
        for url in (str(tmp_path / "empty.db"), bare):
            expect(run(url, "status"), 3, "has no schema", "run: policyline ledger upgrade")


def test_a_database_that_is_down_or_not_there(
    run: Command, server: PostgresServer, tmp_path: Path
) -> None:
    with contextmanager(fresh_database)(server) as url:
        fill(url)
        head = head_of(url)
        server.stop()
        try:
            for done in run.all(url, [*READING, *APPENDING, "upgrade", "export -"]).values():
                expect(done, 3, "is unavailable")
        finally:
            server.start_again()
        assert head_of(url) == head
    missing = str(tmp_path / "none.db")
    expect(run(missing, "status"), 3, "does not exist", "run: policyline ledger upgrade")
    expect(run(str(tmp_path / "no" / "none.db"), "upgrade"), 3, "does not exist; create it first")
    expect(run("mysql://x/y", "status"), 2, "cannot live in 'mysql'", "write sqlite:///")
    expect(run("http:", "status"), 3, "does not exist")
    expect(run("postgresql://host:port/name", "status"), 2, "the ledger's URL cannot be read")
    (tmp_path / "file").touch()
    for command in ("status", "upgrade", "verify"):
        a_file = f"name a file in it: {tmp_path}/ledger.db"
        expect(run(str(tmp_path), command), 2, f"{tmp_path} is a directory", a_file)
    below = str(tmp_path / "file" / "sub" / "ledger.db")
    expect(run(below, "upgrade"), 2, f"{tmp_path}/file is a file, no directory")
    nonsense = tmp_path / "nonsense.db"
    nonsense.write_bytes(b"not a database, whatever its name" * 500)
    expect(run(str(nonsense), "status"), 1, "damaged or no ledger", "restore it from a backup")
    expect(run(str(nonsense), "upgrade"), 1, "damaged or no ledger")
    assert not Path(missing).exists()


def test_something_elses_database_is_left_as_it_is(
    run: Command, tmp_path: Path, server: PostgresServer
) -> None:
    """Names of ours may be others' too: MLflow has a table `runs`, and Alembic its own."""
    strange = tmp_path / "strange.db"
    with closing(sqlite3.connect(strange)) as connection:
        connection.execute("CREATE TABLE runs (a)")
    with closing(sqlite3.connect(tmp_path / "alembic.db")) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('3500859a5d39')")
        connection.commit()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path in before:
        expect(run(str(path), "upgrade"), 1, f"{path} is no ledger", "name the ledger's own")
    expect(run(str(strange), "status"), 1, "something else's tables (runs)")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with contextmanager(fresh_database)(server, "template1") as url:
        run_sql(url, "CREATE TABLE another (a int)")
        assert run(url, "upgrade").returncode == 0
    with contextmanager(fresh_database)(server, "template1") as url:
        run_sql(url, "CREATE TABLE runs (a int)")
        expect(run(url, "upgrade"), 1, "something else's tables (runs)", "name the ledger's own")


def test_postgres_that_only_reads(run: Command, server: PostgresServer) -> None:
    """A standby, or a server in maintenance: questions are answered, appends are not."""
    with contextmanager(fresh_database)(server) as url:
        fill(url)
        head = head_of(url)
        name = url.split("/")[-1].split("?")[0]
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        for command, done in run.all(url, READING).items():
            assert done.returncode == 0, f"{command}\n{done.stderr}"
        for done in run.all(url, [*APPENDING, "repair-projections"]).values():
            expect(done, 3, "read-only transaction", "may write")
        assert head_of(url) == head
    with contextmanager(fresh_database)(server, "template1") as url:
        name = url.split("/")[-1].split("?")[0]
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        expect(run(url, "upgrade"), 3, "read-only transaction")


def test_sqlite_that_only_reads(run: Command, tmp_path: Path) -> None:
    place = Path("/tmp") / f"plro{secrets.token_hex(6)}"  # one that another user may enter
    place.mkdir()
    try:
        url = str(place / "ledger.db")
        upgrade_url(url)
        fill(url)
        head = head_of(url)
        for path in place.iterdir():
            path.chmod(0o444)
        place.chmod(0o555)
        user = NOBODY if os.geteuid() == 0 else None
        for done in run.all(url, [*APPENDING, "upgrade"], user=user).values():
            expect(done, 3, "readonly database", "may")
        for done in run.all(url, READING, user=user).values():
            expect(done, 3, "also to read it", f"write to the directory {place},", "immutable")
        place.chmod(0o755)
        for path in place.iterdir():
            path.chmod(0o644)
        assert head_of(url) == head
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of so many bytes; mounting one takes root."""
    place = Path("/tmp") / f"plsmall{secrets.token_hex(6)}"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(place)]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("a small disk can only be mounted by root")
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)
    finally:
        place.rmdir()


def fill_up(place: Path) -> Path:
    """Leave no byte free; return the file that takes them."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"\0" * 512)
        except OSError:
            return filler


def test_sqlite_on_a_full_disk(run: Command) -> None:
    with small_disk("2m") as place:
        url = str(place / "ledger.db")
        upgrade_url(url)
        fill(url)
        head = head_of(url)
        filler = fill_up(place)
        for done in run.all(url, APPENDING).values():
            expect(done, 3, "not full")
        filler.unlink()
        assert head_of(url) == head
        assert run(url, "pin", "8").returncode == 0


def test_postgres_on_a_full_disk(run: Command, server: PostgresServer) -> None:
    with small_disk("24m") as place:
        space = place / "space"
        space.mkdir()
        if server.embedded.system_user is not None:
            shutil.chown(space, server.embedded.system_user)
        server.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        try:
            server.execute("CREATE DATABASE small TABLESPACE small TEMPLATE policyline_template")
            url = server.database_url("small")
            fill(url)
            head = head_of(url)
            filler = fill_up(place)
            done = run(url, "pause", "--reason", secrets.token_hex(50_000))
            expect(done, 3, "No space left on device", "not full")
            filler.unlink()
            assert head_of(url) == head
            assert run(url, "pause", "--reason", "x").returncode == 0
        finally:
            server.execute("DROP DATABASE IF EXISTS small WITH (FORCE)")
            server.execute("CHECKPOINT")
            server.execute("DROP TABLESPACE small")
