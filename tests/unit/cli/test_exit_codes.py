"""Every error of policyline has one root, and the exit code that scripts rely on."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import typer

import policyline
from policyline.cli.app import run_reporting
from policyline.errors import ExitCode, PolicylineError

FAILED = """
LedgerError Corrupted ManifestInvalid Conflict Refused ProbeDisagrees Fenced StaleEpoch
StaleGeneration StorageError NameTaken FileMissing UnsafePath ContentMismatch PublisherError
CheckFailed MetadataInvalid UnknownVersion PublisherClosed TrainingStopped NothingReady
PublishingBlocked OtherRankFailed NotSupported WatcherError CacheInUse SlotsShort
RuntimeLoadingOff LedgerReplaced ReplicaInUse EngineInUse ReplicaTakenOver
EngineRefusesUs ListenFailed RouterError UpstreamFailed UpstreamUnreachable UpstreamAckLost
UpstreamBroken DemoError ReplayError NamesInUse ServerInUse ServerPaused CacheUnseen BuildChanged
Unreadable EngineError EngineHangs EngineUnauthorized RuntimeLoraDisabled RouteMissing
AdapterAlreadyLoaded AdapterMissing AdapterRefused RequestRefused NonFinite EngineFault
"""
USAGE = """
NotFound InvalidName InvalidTime InvalidUrl SchemeUnsupported BaseModelInvalid SettingsInvalid
NothingToReplay StateInvalid
"""
UNREACHABLE = """
LedgerUnavailable SchemaMismatch StorageUnavailable StorageUnwritable StorageFull CacheUnusable
SpoolUnusable EngineMissing ServerGone Unanswered EngineUnreachable EngineTimeout EngineDead
"""
CODES = {
    name: code
    for names, code in (
        (FAILED, ExitCode.FAILED),
        (USAGE, ExitCode.USAGE),
        (UNREACHABLE, ExitCode.UNREACHABLE),
    )
    for name in names.split()
}


def errors() -> Iterator[type[PolicylineError]]:
    """Every error class of every module called `errors`, and doctor's."""
    for module in pkgutil.walk_packages(policyline.__path__, "policyline."):
        if module.name.endswith((".errors", ".doctor.model")):
            importlib.import_module(module.name)
    pending = [PolicylineError]
    while pending:
        found = pending.pop().__subclasses__()
        yield from found
        pending += found


@pytest.mark.parametrize("kind", sorted(set(errors()), key=str))
def test_every_error_has_its_exit_code(kind: type[PolicylineError]) -> None:
    assert kind.exit_code == CODES[kind.__name__]


def test_the_codes_are_of_errors_that_exist() -> None:
    assert {kind.__name__ for kind in errors()} == CODES.keys()


def failing(error: Exception) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PolicylineError("no run", hint="open one"), 1, "policyline: no run; open one\n"),
        (PolicylineError("two\nlines\x1b[31m"), 1, "policyline: two lines\\x1b[31m\n"),
        (OSError(28, "No space left"), 3, "policyline: [Errno 28] No space left\n"),
    ],
)
def test_a_known_error_is_one_line_on_stderr(
    error: Exception,
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["policyline"])

    assert run_reporting(failing(error)) == code

    assert capsys.readouterr().err == text


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(5, "Input/output error")])
def test_an_unknown_error_keeps_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["policyline"])

    with pytest.raises(type(error)):
        run_reporting(failing(error))
