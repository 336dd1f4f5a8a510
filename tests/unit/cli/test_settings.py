"""Every setting is declared once: default, flag, environment variable, help, unit, bounds."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import logging
import pkgutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import policyline
from policyline.cli import app as root
from policyline.cli.app import root as root_options
from policyline.cli.command import Options, add_command
from policyline.demo.settings import DemoSettings
from policyline.doctor.settings import Target
from policyline.errors import SettingsInvalid
from policyline.ledger.settings import RunSettings
from policyline.publisher.settings import PublishTo
from policyline.replay_into.settings import ReplaySettings
from policyline.router.settings import RouterSettings
from policyline.setting import Setting, check_bounds, declared
from policyline.trainers.settings import TrainerSettings
from policyline.watcher.settings import EngineTimeouts, SidecarSettings

COMMANDS: dict[type[Any], str] = {
    SidecarSettings: "sidecar",
    EngineTimeouts: "sidecar",
    RouterSettings: "router",
    TrainerSettings: "router",
    RunSettings: "ledger open-run",
    DemoSettings: "demo",
    Target: "doctor",
    ReplaySettings: "ledger replay",
}
"""Where each can be set. `PublishTo` is set in Python alone."""
NOT_OPTIONS: dict[type[Any], set[str]] = {
    TrainerSettings: {"line", "run"},  # the router's, and an object of its own
    DemoSettings: {"line", "run"},  # a demo has one of each
    ReplaySettings: {"run", "versions"},  # what is asked, not how
}
NEEDED: dict[type[Any], dict[str, Any]] = {
    SidecarSettings: {"replica": "r0", "cache": Path("cache")},
    DemoSettings: {"workdir": Path("demo")},
    ReplaySettings: {"run": "grpo-7"},
    RouterSettings: {"spool": Path("spool")},
}
"""Fields without a default, or whose default the command computes."""


def every_setting() -> Iterator[tuple[type[Any], str]]:
    for kind in COMMANDS:
        for name in declared(kind):
            yield kind, name


EACH = pytest.mark.parametrize(
    ("kind", "name"), list(every_setting()), ids=lambda v: v if isinstance(v, str) else v.__name__
)


def test_no_dataclass_of_settings_is_left_out() -> None:
    found = set()
    for module in pkgutil.walk_packages(policyline.__path__, "policyline."):
        if module.name.endswith(".settings"):
            here = vars(importlib.import_module(module.name)).values()
            found |= {
                c for c in here if dataclasses.is_dataclass(c) and c.__module__ == module.name
            }

    assert found == COMMANDS.keys() | {PublishTo}


@pytest.mark.parametrize("kind", list(COMMANDS))
def test_every_field_is_a_setting(kind: type[Any]) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}

    assert fields == declared(kind).keys() | NOT_OPTIONS.get(kind, set())


@EACH
def test_a_setting_has_flag_variable_help_unit_and_bound(kind: type[Any], name: str) -> None:
    hint, setting = declared(kind)[name]

    assert setting.flag.startswith("--")
    assert setting.environment_variable.startswith("POLICYLINE_")
    assert setting.help.endswith((".", "?"))
    if {int, float} & {hint, *getattr(hint, "__args__", ())}:
        assert setting.unit
        assert setting.minimum is not None


def options_of(command: str) -> dict[str, Any]:
    found: Any = typer.main.get_command(root)
    for word in command.split():
        found = found.commands[word]
    return {p.envvar: p for p in found.params if p.param_type_name == "option"}


@EACH
def test_its_command_has_it_with_the_default_of_the_dataclass(kind: type[Any], name: str) -> None:
    _, setting = declared(kind)[name]
    option = options_of(COMMANDS[kind])[setting.environment_variable]
    default = {f.name: f.default for f in dataclasses.fields(kind)}[name]

    assert option.opts == [setting.flag]
    if setting.computed:
        assert option.default is None
    else:
        assert option.default == default


def captured(kind: type[Any], *arguments: str, env: dict[str, str] | None = None) -> Any:
    """The settings that a command is given."""
    app, seen = typer.Typer(), []

    def command(options: Any) -> None:
        computed = {k: v for k, v in NEEDED.get(kind, {}).items() if not options.given.get(k)}
        seen.append(options.build(**computed))

    command.__annotations__ = {"options": Options[kind]}  # type: ignore[valid-type]
    add_command(app, command, "example")
    done = CliRunner().invoke(app, arguments, env=env or {}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return seen[0]


def another(hint: Any, setting: Setting, default: Any) -> tuple[str, Any]:
    """A value that is not the default, as text and as it is."""
    kinds = {hint, *getattr(hint, "__args__", ())}
    choices: Any = next((k for k in kinds if isinstance(k, enum.EnumMeta)), None)
    if choices is not None:
        value = next(choice for choice in choices if choice != default)
        return str(value), value
    if setting.metavar == "HOST:PORT":
        return "127.0.0.2:1", "127.0.0.2:1"
    if setting.metavar == "URL":
        return "http://127.0.0.1:9", "http://127.0.0.1:9"
    for kind, text, value in (
        (bool, "1", True),
        (int, "7", 7),
        (float, "5.5", 5.5),
        (Path, "other", Path("other")),
    ):
        if kind in kinds:
            return text, value
    return "other", "other"


@EACH
def test_its_variable_reaches_the_dataclass(kind: type[Any], name: str) -> None:
    hint, setting = declared(kind)[name]
    before = captured(kind)
    text, value = another(hint, setting, getattr(before, name))

    after = captured(kind, env={setting.environment_variable: text})

    assert getattr(before, name) != value
    assert getattr(after, name) == value
    for other in dataclasses.fields(kind):
        if other.name != name:
            assert getattr(after, other.name) == getattr(before, other.name)


@pytest.mark.parametrize("kind", list(COMMANDS))
def test_with_nothing_given_the_settings_are_the_defaults(kind: type[Any]) -> None:
    assert captured(kind) == kind(**NEEDED.get(kind, {}))


def test_a_word_stands_for_none() -> None:
    assert captured(RunSettings, "--min-ready", "all").min_ready is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["router", "--ledger", "x.db", "--spill", "-1"], ["--spill", "'-1'", "0 or more"]),
        (
            ["router", "--ledger", "x.db", "--run-min-ready", "0"],
            ["--run-min-ready", "'0'", "1 to 1000000", "all"],
        ),
        (["demo", "--replicas", "0"], ["--replicas", "'0'", "1 or more"]),
        (["doctor", "--timeout", "soon"], ["--timeout", "'soon'", "0.1 or more"]),
        (
            ["ledger", "open-run", "r", "--ledger", "x.db", "--min-ready", "few"],
            ["--min-ready", "'few'", "1 to 1000000", "all"],
        ),
    ],
)
def test_a_bad_value_is_a_usage_error_with_flag_value_and_bound(
    arguments: list[str], words: list[str]
) -> None:
    done = CliRunner().invoke(root, arguments, env={"COLUMNS": "200"})

    assert done.exit_code == 2
    for word in words:
        assert word in done.output


@dataclasses.dataclass(frozen=True)
class Example:
    wait_s: typing.Annotated[float, Setting("--wait", "How long.", "seconds", 0.5, 10)] = 1.0

    def __post_init__(self) -> None:
        check_bounds(self)


@pytest.mark.parametrize("value", [0.4, 10.1, -1.0, float("nan"), float("inf")])
def test_a_value_out_of_bounds_is_refused_in_python_too(value: float) -> None:
    with pytest.raises(
        SettingsInvalid, match=r"wait_s .* is not a number of seconds, 0\.5 to 10; .*--wait"
    ):
        Example(value)


@pytest.mark.parametrize("value", [0.5, 10])
def test_the_bounds_are_inclusive(value: float) -> None:
    assert Example(value).wait_s == value


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "", "1_", "ten"])
def test_no_setting_takes_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Setting("--linger", "How long.", "seconds", 0).parse(text, float)


def leaves(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        if hasattr(below, "commands"):
            yield from leaves(below, f"{path}{name} ")
        else:
            yield f"{path}{name}", below


@pytest.mark.parametrize(
    "command", [c for _, c in leaves(typer.main.get_command(root))], ids=lambda c: c.name
)
def test_every_command_takes_the_options_of_its_logs(command: Any) -> None:
    flags = {flag for p in command.params for flag in p.opts}

    assert {"--log-format", "--verbose", "-v"} <= flags


@pytest.fixture
def logs() -> Iterator[None]:
    """The root logger as it was."""
    logger, ours = logging.getLogger(), logging.getLogger("policyline")
    before = logger.handlers[:], logger.level, ours.level
    yield
    logger.handlers[:] = before[0]
    logger.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["text info"]),
        (["--log-format", "json", "speak"], ["json info"]),
        (["speak", "--log-format", "json"], ["json info"]),
        (["--log-format", "json", "speak", "--log-format", "text"], ["text info"]),
        (["-v", "speak", "--log-format", "json"], ["json debug", "json info"]),
        (["speak", "-v"], ["text debug", "text info"]),
    ],
)
def test_the_logs_options_work_before_and_after_the_name(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    app.callback()(root_options)

    def speak() -> None:
        logger = logging.getLogger("policyline.example")
        logger.debug("debug")
        logger.info("info")

    add_command(app, speak, "policyline speak")
    with pytest.raises(SystemExit):
        app(arguments or ["speak"])

    lines = capsys.readouterr().err.splitlines()
    kinds = [
        f"{'json' if x.startswith('{') else 'text'} {'debug' if 'debug' in x else 'info'}"
        for x in lines
    ]
    assert kinds == expected
