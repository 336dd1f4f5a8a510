"""`policyline doctor`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from policyline.cli.options import JsonOption, LineOption
from policyline.cli.output import print_json, visible
from policyline.ledger.names import DEFAULT_LINE, check_line

if TYPE_CHECKING:
    from policyline.doctor.model import Line, Report

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}

EPILOG = """
Examples:

    policyline doctor --vllm http://127.0.0.1:8000 --ledger run.db --storage /mnt/policies

    policyline doctor --storage /mnt/a --sidecar-storage /mnt/b --adapter out/checkpoint-40

    policyline doctor --print-vllm-flags --adapter out/checkpoint-40 --max-staleness 4

Every line: pass, warn, fail or skip; name; value; remedy. Exit code 0: nothing failed; 1: a check
failed; 3: something that was given did not answer.
"""


def add_to(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(epilog=EPILOG)(doctor)


def doctor(
    vllm: Annotated[
        str | None, typer.Option(envvar="POLICYLINE_VLLM", help="Base URL of a vLLM server.")
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_ADAPTER", help="What PEFT saved: can vLLM serve it as it is?"
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(envvar="POLICYLINE_STORAGE", help="Storage as the publisher sees it."),
    ] = None,
    sidecar_storage: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_SIDECAR_STORAGE",
            help="The same storage as a sidecar sees it: read here what is written to --storage.",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_CACHE", help="The sidecar's --cache: does vLLM read files there?"
        ),
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(
            "--ledger",
            envvar="POLICYLINE_LEDGER",
            help="Ledger: sqlite:///file.db, a plain path, or postgresql://user@host/name.",
        ),
    ] = None,
    line: LineOption = DEFAULT_LINE,
    max_staleness: Annotated[
        int | None,
        typer.Option(
            envvar="POLICYLINE_MAX_STALENESS",
            min=0,
            help="Versions before current that stay served. Default: the open run's, else 4.",
            show_default=False,
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_BASE_MODEL",
            help="Directory (or hub name) of the base model, as vLLM is given it.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_VLLM_API_KEY",
            help="vLLM's API key. Better in the environment: others see a command's flags.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_DOCTOR_TIMEOUT",
            min=0.1,
            help="Longest wait for one measurement, in seconds.",
        ),
    ] = 30.0,
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
    """Measure engine, adapter, storage and ledger, and say what does not fit and what to do.

    Checks what it is given. It loads no adapter (one load fails on purpose), writes no event to
    the ledger, and removes what it writes to the storage.
    """
    from policyline.doctor.engine_facts import NoServerUrl  # noqa: PLC0415 - as the next
    from policyline.doctor.run import Patient, examine, flags  # noqa: PLC0415 - an HTTP client

    given = (vllm, adapter, storage, ledger)
    if not print_vllm_flags and all(one is None for one in given):
        raise typer.BadParameter("give at least one of --vllm, --adapter, --storage, --ledger")
    if sidecar_storage is not None and storage is None:
        raise typer.BadParameter("--sidecar-storage needs --storage, which is written to")
    if cache is not None and vllm is None and not print_vllm_flags:
        raise typer.BadParameter("--cache needs --vllm, which is to read it")
    patient = Patient(
        vllm=vllm,
        api_key=api_key,
        adapter=adapter,
        base_model=base_model,
        storage=storage,
        sidecar_storage=sidecar_storage,
        cache=cache,
        ledger=ledger,
        line=check_line(line),
        max_staleness=max_staleness,
        timeout_s=timeout,
    )
    if print_vllm_flags:
        command = flags(patient)
        if as_json:
            print_json({"command": command})
        else:
            sys.stdout.write(f"{command}\n")
        return
    try:
        report = asyncio.run(examine(patient, _tell))
    except NoServerUrl as error:
        raise typer.BadParameter(f"--vllm: {error}") from error
    _print(report, as_json=as_json)
    raise typer.Exit(report.exit_code)


def _tell(text: str) -> None:
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
    told = visible(f"{' '.join(line.value.split())}{remedy}")
    return Text.assemble((line.status, _COLOURS[line.status]), f"  {line.name:<{width}}  {told}")
