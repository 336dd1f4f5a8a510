"""What the pages name exists: commands, options, variables, extras, files, Python names, events."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from policyline.cli.app import app
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.publisher.settings import PublishTo
from policyline.router import RouterSettings, create_app
from policyline.watcher import transition_log
from policyline.watcher.metrics import SidecarMetrics
from tests.unit.pages.pages import PAGES, PRESENT, ROOT, TRACKED, Code, codes, commands, read

COMMAND: Any = typer.main.get_command(app)
"""Typer brings its own click, so there is no public type for it."""
OTHERS_OPTIONS = {
    # vLLM's
    "--enable-lora", "--max-loras", "--max-cpu-loras", "--max-lora-rank", "--api-server-count",
    "--distributed-executor-backend", "--logprobs-mode", "--generation-config", "--host", "--port",
    # pytest's, and of the benchmarks
    "--import-mode", "--quick", "--pdb", "--dist",
}  # fmt: skip
DATABASE_NAMES = {"policyline_owner", "policyline_writer", "policyline_reader", "policyline_detail"}
USERS_FILES = {"train.py", "storage.py", "router.py", "run.jsonl"}
ONE_OF_TWO = {"rejected", "failed"}
"""What the sidecar says of a load, by whether it may pass."""
MADE_FILES = {"benchmarks/results/*.json"}
FOLDERS = {name.partition("/")[0] for name in TRACKED if "/" in name} - {".ci"}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from leaves(below, (*path, name))


TREE = dict(leaves(COMMAND))
OPTIONS = {o for c in TREE.values() for p in c.params for o in (*p.opts, *p.secondary_opts)}
OPTIONS |= {"--help", "-h"}
VARIABLES = {
    str(p.envvar) for c in TREE.values() for p in c.params if getattr(p, "envvar", None)
}  # fmt: skip


def split(arguments: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """(path in the command tree, the rest)."""
    path: tuple[str, ...] = ()
    rest = list(arguments)
    while rest and (*path, rest[0]) in TREE:
        path = (*path, rest.pop(0))
    return path, rest


def is_call(code: Code, arguments: list[str]) -> bool:
    """A call, and not the package's name in a sentence, a folder or a Python import."""
    return bool(arguments) and code.language not in {"python", "py", "sql", "diff"}


CALLS = [
    pytest.param(code, arguments, id=f"{code.page}: {' '.join(arguments)[:60]}")
    for code in codes(PRESENT)
    for arguments in commands(code, "policyline")
    if is_call(code, arguments)
]


@pytest.mark.parametrize(("code", "arguments"), CALLS)
def test_a_command_and_its_options_exist(code: Code, arguments: list[str]) -> None:
    path, rest = split(arguments)
    command = TREE[path]
    if hasattr(command, "commands"):
        values = {"json", "..."}
        assert [w for w in rest if not w.startswith("-") and w not in values] == []
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    named = [word.partition("=")[0] for word in rest if word.startswith("-")]
    assert [option for option in named if option not in known] == []


@pytest.mark.parametrize(
    ("code", "arguments"),
    [call for call in CALLS if call.values[0].language in {"sh", "bash"}],  # type: ignore[union-attr]
)
def test_a_command_in_a_block_is_complete(
    code: Code, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command line reads it: nothing is missing, every value is of its type."""
    if "POLICYLINE_LEDGER" in read(code.page):  # a page that exports it says so
        monkeypatch.setenv("POLICYLINE_LEDGER", "run.db")
    monkeypatch.chdir(tmp_path)
    for given in ("my-adapter", "run.jsonl"):
        Path(given).mkdir()
    path, rest = split(arguments)
    TREE[path].make_context(" ".join(path), rest)


def test_an_option_in_a_sentence_exists() -> None:
    spans = [c for c in codes(PRESENT) if c.language is None and not c.text.startswith("pg_")]
    named = [
        (code.page, option)
        for code in spans
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code.text)
    ]
    assert len(named) > 30
    assert [(p, o) for p, o in named if o not in OPTIONS | OTHERS_OPTIONS] == []


def test_an_environment_variable_exists() -> None:
    elsewhere = {
        name
        for file in TRACKED
        if file == "Makefile" or (file.endswith(".py") and "tests/unit/pages" not in file)
        for name in re.findall(r"\bPOLICYLINE_[A-Z_]+\b", (ROOT / file).read_text())
    }
    named = [(p, v) for p in PRESENT for v in re.findall(r"\bPOLICYLINE_[A-Z_]+\b", read(p))]
    assert named
    assert [(p, v) for p, v in named if v not in VARIABLES | elsewhere] == []


def test_an_extra_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [
        (page, extra.strip())
        for page in PRESENT
        for extras in re.findall(r"(?:\.|policyline)\[([a-z0-9, ]+)\]", read(page))
        for extra in extras.split(",")
    ]
    assert named
    assert [(p, e) for p, e in named if e not in project["optional-dependencies"]] == []


def test_a_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = [
        (code.page, arguments[0])
        for code in codes(PRESENT)
        if code.language in {None, "", "sh", "bash"}
        for arguments in commands(code, "make")
        if arguments
    ]
    assert ("README.md", "demo") in named
    assert [(p, t) for p, t in named if t not in targets] == []


def exists(path: str) -> bool:
    bare = path.rstrip("/")
    return bare in TRACKED or any(
        name.startswith(f"{bare}/") or fnmatch(name, bare) for name in TRACKED
    )


def test_a_file_exists() -> None:
    named = []
    for code in codes(PRESENT):
        if code.language is not None:
            continue
        folder = code.text.partition("/")[0]
        in_repository = re.fullmatch(r"[\w.*/-]+", code.text) and "/" in code.text
        if in_repository and folder in FOLDERS and code.text not in MADE_FILES:
            named.append((code.page, code.text, exists(code.text)))
        if re.fullmatch(r"\w+\.(py|toml|md)", code.text) and code.text not in USERS_FILES:
            known = any(Path(name).name == code.text for name in TRACKED)
            named.append((code.page, code.text, known))
    assert len(named) > 20
    assert [(page, name) for page, name, there in named if not there] == []


def test_a_link_leads_somewhere() -> None:
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", read(page))
        if "://" not in target
    ]
    assert len(links) > 20
    gone = [(page, t) for page, t in links if not (ROOT / page).parent.joinpath(t).exists()]
    assert gone == []


def defined(dotted: str) -> bool:
    """Whether a module or a name of one exists; what needs TRL is only read."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if not source.exists():
            continue
        if length == len(parts):
            return True
        if parts[:3] == ["policyline", "publisher", "trl"]:
            return parts[length] in _top_names(source)
        value: Any = importlib.import_module(".".join(parts[:length]))
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def _top_names(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Assign():
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            case ast.AnnAssign(target=ast.Name() as target):
                names.add(target.id)
    return names


def test_a_python_name_exists() -> None:
    named = []
    for code in codes(PRESENT):
        for module, names in re.findall(r"from (policyline[\w.]*) import ([\w, ]+)", code.text):
            named += [(code.page, f"{module}.{name.strip()}") for name in names.split(",")]
        if code.language in {None, "python", "py", "eval"}:
            named += [(code.page, n) for n in re.findall(r"\bpolicyline(?:\.\w+)+", code.text)]
    endings = (".dump", ".NAME")
    wrong = [(p, n) for p, n in named if not n.endswith(endings) and not defined(n)]
    assert len(named) > 10
    assert wrong == []


def test_what_publish_to_is_given_exists() -> None:
    fields = {field.name for field in dataclasses.fields(PublishTo)}
    given = [
        (code.page, keyword)
        for code in codes(PRESENT)
        for call in re.findall(r"PublishTo\(([^()]*)\)", code.text)
        for keyword in re.findall(r"(\w+)=", call)
    ]
    assert given
    assert [(p, k) for p, k in given if k not in fields] == []


def log_events() -> set[str]:
    """Every event that something logs."""
    found = set(ONE_OF_TWO)
    for name in TRACKED:
        if not name.endswith(".py") or name.startswith(("tests/", "benchmarks/", "examples/")):
            continue
        text = (ROOT / name).read_text()
        found |= set(re.findall(r"\"event\": \"([a-z_]+)\"", text))
        found |= set(re.findall(r"\b_log\(\s*\"([a-z_]+)\",", text))
    for value in vars(transition_log).values():
        if isinstance(value, transition_log.Condition):
            found |= {value.failed, value.recovered}
    return found


def test_the_table_has_every_log_event_and_no_other() -> None:
    table = read("docs/metrics.md").partition("## Log events")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([a-z_]+)`", table, re.MULTILINE)
    assert sorted(documented) == sorted(log_events())


async def test_the_tables_have_every_metric_and_no_other(tmp_path: Path) -> None:
    """Of a sidecar, and of a router that was just started."""
    url = str(tmp_path / "ledger.db")
    upgrade_url(url)
    with Ledger(url) as ledger:
        async with create_app(RouterSettings(spool=tmp_path / "spool"), ledger) as router:
            port = await router.listen("127.0.0.1", 0)
            router.stop()
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://127.0.0.1:{port}/metrics")
    texts = (SidecarMetrics().text().decode(), answer.text)
    shown = {
        n for text in texts for n in re.findall(r"^# TYPE (policyline_\w+)", text, re.MULTILINE)
    }
    shown = {name for name in shown if not name.endswith("_created")}
    documented = re.findall(r"^\| `(policyline_\w+)`", read("docs/metrics.md"), re.MULTILINE)
    assert sorted(documented) == sorted(shown)


def test_readme_is_short() -> None:
    assert len(read("README.md").encode()) < 6000


def test_lines_are_at_most_120_characters() -> None:
    long = [
        (page, number)
        for page in PAGES
        for number, line in enumerate(read(page).splitlines(), start=1)
        if len(line) > 120
    ]
    assert long == []


def test_the_hooks_run_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks == checks
