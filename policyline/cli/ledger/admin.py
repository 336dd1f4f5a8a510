"""Verbs that steer: upgrade, runs, pins, another try, withdrawal, rollback, pause and resume."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from policyline.cli.command import Options
from policyline.cli.ledger.arguments import MOST as VERSIONS
from policyline.cli.ledger.arguments import VersionArgument, version_number
from policyline.cli.options import (
    JsonOption,
    LedgerOption,
    LineOption,
    TakeOverOption,
)
from policyline.cli.output import print_json
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.names import DEFAULT_LINE

ReasonOption = Annotated[
    str, typer.Option(envvar="POLICYLINE_REASON", help="Why, for whoever audits the run.")
]


def upgrade(ledger: LedgerOption) -> None:
    """Create the ledger or bring its schema to this release's. Safe to repeat."""
    before, after = upgrade_url(ledger)
    what = "is up to date at" if before == after else "upgraded to"
    sys.stdout.write(f"ledger {what} schema {after}\n")


def open_run(
    run: Annotated[str, typer.Argument(help="Name of the run, unique in the ledger.")],
    ledger: LedgerOption,
    rules: Options[RunSettings],
    line: LineOption = DEFAULT_LINE,
    parent_run: Annotated[
        str | None, typer.Option(envvar="POLICYLINE_PARENT_RUN", help="Run it goes on from.")
    ] = None,
    parent_version: Annotated[
        int | None,
        typer.Option(
            envvar="POLICYLINE_PARENT_VERSION",
            min=1,
            max=VERSIONS,
            help="Version of the parent run that it starts from.",
        ),
    ] = None,
    take_over: TakeOverOption = False,
    as_json: JsonOption = False,
) -> None:
    """Open a run on a line; this closes the line's former run."""
    with Ledger(ledger) as opened:
        claim = opened.open_run(
            run,
            line=line,
            settings=rules.build(),
            parent_run=parent_run,
            parent_version=parent_version,
            take_over=take_over,
        )
        opened.release(claim)
    if as_json:
        print_json(claim)
    else:
        sys.stdout.write(f"run {run} of line {line} is open, epoch {claim.epoch}\n")


def close_run(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    ledger: LedgerOption,
    take_over: TakeOverOption = False,
) -> None:
    """Close a run. What it serves goes on being served until another run's version is current."""
    with Ledger(ledger) as opened:
        opened.close_run(run, take_over=take_over)
    sys.stdout.write(f"run {run} is closed\n")


def pin(
    version: VersionArgument,
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    serve: Annotated[
        bool, typer.Option("--serve", envvar="POLICYLINE_SERVE", help="Keep it served too.")
    ] = False,
) -> None:
    """Keep a version's files outside the window; with --serve keep it served too."""
    number = version_number(line, version)
    with Ledger(ledger) as opened:
        opened.pin(line, number, serve=serve)
    sys.stdout.write(f"version {number} is pinned{' and served' if serve else ''}\n")


def unpin(version: VersionArgument, ledger: LedgerOption, line: LineOption = DEFAULT_LINE) -> None:
    """Undo a pin."""
    number = version_number(line, version)
    with Ledger(ledger) as opened:
        opened.unpin(line, number)
    sys.stdout.write(f"version {number} is not pinned\n")


def retry(
    version: VersionArgument,
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    replica: Annotated[
        str | None,
        typer.Option(help="Only on this replica; without it, wherever."),
    ] = None,
) -> None:
    """Let sidecars try a version again that they rejected or quarantined, its cause being gone."""
    number = version_number(line, version)
    with Ledger(ledger) as opened:
        replicas = opened.retry(line, number, replica=replica)
    if replicas:
        sys.stdout.write(f"version {number} is tried again on {', '.join(replicas)}\n")
    else:
        where = "any replica" if replica is None else f"replica {replica}"
        sys.stdout.write(f"version {number} is not rejected on {where}\n")


def withdraw(
    version: VersionArgument,
    ledger: LedgerOption,
    reason: ReasonOption,
    line: LineOption = DEFAULT_LINE,
) -> None:
    """Take a version out of service for ever; its name is not used again."""
    number = version_number(line, version)
    with Ledger(ledger) as opened:
        opened.withdraw(line, number, reason)
    sys.stdout.write(f"version {number} is withdrawn\n")


def rollback(
    to: Annotated[
        str,
        typer.Option("--to", envvar="POLICYLINE_ROLLBACK_TO", help="Version to go back to."),
    ],
    ledger: LedgerOption,
    reason: ReasonOption,
    line: LineOption = DEFAULT_LINE,
) -> None:
    """Make an earlier version current again, withdraw the later ones, fence the publisher."""
    number = version_number(line, to)
    with Ledger(ledger) as opened:
        withdrawn = opened.roll_back(line, number, reason)
    later = ", ".join(map(str, withdrawn)) or "none"
    sys.stdout.write(f"version {number} is current; withdrawn: {later}; the publisher is fenced\n")


def pause(ledger: LedgerOption, reason: ReasonOption, line: LineOption = DEFAULT_LINE) -> None:
    """Ask every sidecar of the line to pause its engine, until `resume`."""
    with Ledger(ledger) as opened:
        changed = opened.pause(line, reason)
    sys.stdout.write(
        f"line {line} {'is' if changed else 'was already'} to be paused; each sidecar pauses its "
        "vLLM, or shows in its /status why it cannot\n"
    )


def resume(ledger: LedgerOption, line: LineOption = DEFAULT_LINE) -> None:
    """Undo `pause`."""
    with Ledger(ledger) as opened:
        changed = opened.resume(line)
    sys.stdout.write(f"line {line} {'is resumed' if changed else 'was not paused'}\n")
