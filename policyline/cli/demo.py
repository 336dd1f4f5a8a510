"""`policyline demo`."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from policyline.cli.command import Options
from policyline.cli.options import JsonOption
from policyline.demo.settings import DemoSettings

if TYPE_CHECKING:
    from policyline.demo.report import Report

PIPE_WIDTH = 120
"""Columns of the table where stdout is no terminal."""


def demo(
    options: Options[DemoSettings],
    keep: Annotated[
        bool,
        typer.Option(
            envvar="POLICYLINE_DEMO_KEEP",
            help="Keep ledger, storage and logs. They always stay when something went wrong.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the whole pipeline on this machine and check every invariant.

    Starts vLLM servers and sidecars, publishes versions while a client generates, and shows which
    version was served where and when. Everything it started is stopped in the end.
    """
    # Here, so that other commands do not wait for the fleet's imports.
    from policyline.demo.progress import Progress  # noqa: PLC0415 - see above
    from policyline.demo.run import require_engine, run_demo  # noqa: PLC0415 - see above

    # the progress shows the publisher's INFO logs anyway; -v asks for them too
    logger = logging.getLogger("policyline.publisher")
    if logger.getEffectiveLevel() == logging.INFO:
        logger.setLevel(logging.WARNING)
    console = Console(stderr=True, soft_wrap=True)
    workdir = options.given["workdir"]
    if workdir is not None and workdir.is_file():
        raise typer.BadParameter(f"{workdir} is a file", param_hint="--workdir")
    if workdir is not None and workdir.exists() and any(workdir.iterdir()):
        raise typer.BadParameter(f"{workdir} is not empty", param_hint="--workdir")
    require_engine(options.given["engine"])
    settings = options.build(
        workdir=(workdir or Path(tempfile.mkdtemp(prefix="policyline-demo-"))).resolve()
    )
    remove = False
    try:
        report = _until_signalled(run_demo(settings, Progress(console)))
        remove = not keep and (isinstance(report, int) or report.ok)
        if isinstance(report, int):
            console.print("interrupted: everything was stopped")
            raise typer.Exit(128 + report)
    finally:
        if remove:
            shutil.rmtree(settings.workdir, ignore_errors=True)
        else:
            console.print(f"files are in {settings.workdir}", markup=False, highlight=False)
    _print(report, as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)


def _until_signalled(demo: Coroutine[None, None, Report]) -> Report | int:
    """Run it; the first SIGINT, SIGTERM or SIGHUP cancels it, so that it stops what it started.

    Then it returns the signal. Further ones are ignored: a second Ctrl-C must not leave engines
    behind, and stopping takes seconds at most.
    """
    caught: list[int] = []

    async def guarded() -> Report:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            if not caught:
                task.cancel()
            caught.append(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await demo

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        return caught[0] if caught else signal.SIGINT


def _print(report: Report, *, as_json: bool) -> None:
    """The result on stdout; with `--json` the tables go to stderr, where a person reads."""
    from policyline.demo.report import show  # noqa: PLC0415 - see `demo`

    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    console = Console(stderr=as_json)
    show(report, console if console.is_terminal else Console(stderr=as_json, width=PIPE_WIDTH))
