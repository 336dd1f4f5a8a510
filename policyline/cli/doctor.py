"""`policyline doctor`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from policyline.cli.command import Options
from policyline.cli.options import JsonOption
from policyline.cli.output import print_json, visible
from policyline.doctor.settings import Target

if TYPE_CHECKING:
    from policyline.doctor.model import Line, Report

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim", "note": "cyan"}

EPILOG = """
Examples:

    policyline doctor --vllm http://127.0.0.1:8000 --ledger run.db --storage /mnt/policies

    policyline doctor --storage /mnt/a --sidecar-storage /mnt/b --adapter out/checkpoint-40

    policyline doctor --print-vllm-flags --adapter out/checkpoint-40 --max-staleness 4

Every line: pass, warn, fail, note or skip; name; value; remedy. Exit code 0: nothing failed; 1: a
check failed; 3: something that was given did not answer.
"""


def doctor(
    options: Options[Target],
    print_vllm_flags: Annotated[
        bool,
        typer.Option(
            "--print-vllm-flags",
            envvar="POLICYLINE_PRINT_VLLM_FLAGS",
            help="Measure nothing; print the line that starts a fitting vLLM server.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure engine, adapter, storage and ledger, and show what does not fit and what to do.

    Checks what it is given. It loads no adapter (one load fails on purpose), writes no event to
    the ledger, and removes what it writes to the storage.
    """
    from policyline.doctor.engine_facts import NoServerUrl  # noqa: PLC0415 - as the next
    from policyline.doctor.run import examine, flags  # noqa: PLC0415 - an HTTP client

    target = options.build()
    if not (print_vllm_flags or target.vllm or target.adapter or target.storage or target.ledger):
        raise typer.BadParameter("give at least one of --vllm, --adapter, --storage, --ledger")
    if target.sidecar_storage is not None and target.storage is None:
        raise typer.BadParameter("--sidecar-storage needs --storage, which is written to")
    if target.cache is not None and target.vllm is None and not print_vllm_flags:
        raise typer.BadParameter("--cache needs --vllm, which is to read it")
    if print_vllm_flags:
        command = flags(target)
        if as_json:
            print_json({"command": command})
        else:
            sys.stdout.write(f"{command}\n")
        return
    try:
        report = asyncio.run(examine(target, _show_progress))
    except NoServerUrl as error:
        raise typer.BadParameter(f"--vllm: {error}") from error
    _print(report, as_json=as_json)
    raise typer.Exit(report.exit_code)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{text} ...\n")


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        print_json({"exit_code": report.exit_code, "checks": [asdict(i) for i in report.lines]})
        return
    width = max((len(line.name) for line in report.lines), default=0)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for line in report.lines:
        console.print(_text(line, width), no_wrap=True, overflow="ignore", crop=False)


def _text(line: Line, width: int) -> Text:
    remedy = f"  -> {line.remedy}" if line.remedy else ""
    text = visible(f"{' '.join(line.value.split())}{remedy}")
    return Text.assemble((line.status, _COLOURS[line.status]), f"  {line.name:<{width}}  {text}")
