"""`policyline ledger replay`: a run's history, or its versions served again."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from policyline.cli.command import Options
from policyline.cli.ledger.arguments import FromOption, ToOption, check_order, event_json
from policyline.cli.ledger.replay_into import IntoOptions, replay_into
from policyline.cli.options import JsonOption, LedgerOption
from policyline.cli.output import clock, print_json_line, print_line
from policyline.ledger import Ledger
from policyline.ledger.read.replay import Replayer, describe, replay
from policyline.replay_into.settings import ReplaySettings

EPILOG = """
Examples:

    policyline ledger replay grpo-7 --to 250

    policyline ledger replay grpo-7 --into http://127.0.0.1:8000 --storage /mnt/policies \\
        --versions 3..40 --state replay.json
"""


def replay_run(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    ledger: LedgerOption,
    options: Options[ReplaySettings],
    first: FromOption = 1,
    last: ToOption = None,
    speed: Annotated[
        float | None,
        typer.Option(
            envvar="POLICYLINE_SPEED",
            min=0.001,
            help="Keep the run's pace, this many times faster; without it, at once.",
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            envvar="POLICYLINE_INTO",
            help="Base URL of a vLLM server that no sidecar uses: serve the run's versions there "
            "again, and compare each probe with the recorded one.",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(envvar="POLICYLINE_STORAGE", help="With --into: where the bytes are."),
    ] = None,
    versions: Annotated[
        str | None,
        typer.Option(metavar="A..B", help="With --into: only these versions."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_REPLAY_CACHE",
            help="With --into: directory for local copies that vLLM reads under the same path. "
            "Default: ~/.cache/policyline/replay-HOST-PORT.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_REPLAY_STATE",
            help="With --into: file that keeps what is done; the same command then goes on.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_VLLM_API_KEY",
            help="With --into: vLLM's API key. Better in the environment.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a run's history as a timeline, with the fleet's state after each event.

    With --into, serve its versions again on a live vLLM server instead, one after another, and
    exit with 1 when one is not what it was.
    """
    if into is not None:
        if first != 1 or last is not None or speed is not None:
            raise typer.BadParameter("--into takes --versions, not --from, --to or --speed")
        replay_into(
            IntoOptions(
                run=run,
                ledger=ledger,
                vllm=into,
                storage=storage,
                versions=versions,
                cache=cache,
                state=state,
                settings=options,
                api_key=api_key,
                as_json=as_json,
            )
        )
        return
    check_order(first, last)
    _print_history(run, ledger, first=first, last=last, speed=speed, as_json=as_json)


def _print_history(
    run: str, ledger: str, *, first: int, last: int | None, speed: float | None, as_json: bool
) -> None:
    with Ledger(ledger) as opened:
        before: datetime | None = None
        for event, replayer in replay(opened, run, first=first, last=last):
            if speed is not None:
                sys.stdout.flush()
                time.sleep(((event.moment - (before or event.moment)).total_seconds()) / speed)
                before = event.moment
            if as_json:
                print_json_line({"event": event_json(event), "state": _state_json(replayer)})
            else:
                print_line(f"{event.seq:>8}  {clock(event.recorded_at)}  {describe(event)}")
                print_line(f"{'':>8}  {_state_line(replayer)}")


def _state_json(state: Replayer) -> dict[str, Any]:
    return {
        "current": state.line.current,
        "candidate": state.line.candidate,
        "served": state.served(),
    }


def _state_line(state: Replayer) -> str:
    served = "  ".join(
        f"{replica}: {' '.join(f'v{v}' for v in versions) or 'nothing'}"
        for replica, versions in state.served().items()
    )
    current = "-" if state.line.current is None else f"v{state.line.current}"
    candidate = "-" if state.line.candidate is None else f"v{state.line.candidate}"
    return f"current {current}, candidate {candidate}; serving {served or 'no replica'}"
