"""Options that several commands share, each with its environment variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from policyline.ledger.settings import MOST

LedgerOption = Annotated[
    str,
    typer.Option(
        "--ledger",
        envvar="POLICYLINE_LEDGER",
        help="Ledger: sqlite:///file.db, a plain path, or postgresql://user@host/name.",
    ),
]
StorageOption = Annotated[
    str,
    typer.Option(
        "--storage",
        envvar="POLICYLINE_STORAGE",
        help="Where versions are kept: a directory (local or mounted) or its URL.",
    ),
]
LineOption = Annotated[
    str,
    typer.Option(
        "--line", envvar="POLICYLINE_LINE", help="Line: the prefix of every version's name."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", envvar="POLICYLINE_JSON", help="Print JSON on stdout.")
]
MaxStalenessOption = Annotated[
    int,
    typer.Option(
        envvar="POLICYLINE_MAX_STALENESS",
        min=0,
        max=MOST,
        help="Versions before current that stay served; a server needs --max-loras of 2 more.",
    ),
]
MinReadyOption = Annotated[
    str,
    typer.Option(
        envvar="POLICYLINE_MIN_READY",
        help="Replicas that must ack before the grace counts: a number, or all.",
    ),
]
ReadyGraceOption = Annotated[
    float,
    typer.Option(
        envvar="POLICYLINE_READY_GRACE",
        min=0.0,
        max=MOST,
        help="Seconds after the first ack for which slower replicas are waited for.",
    ),
]
CandidateTimeoutOption = Annotated[
    float,
    typer.Option(
        envvar="POLICYLINE_CANDIDATE_TIMEOUT",
        min=0.001,
        max=MOST,
        help="Seconds after which a version that is not ready is withdrawn.",
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over",
        envvar="POLICYLINE_TAKE_OVER",
        help="Fence a live publisher of the run instead of stopping.",
    ),
]


def default_cache(name: str) -> Path:
    """Where `name` is kept when no option says so: XDG's cache directory of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "policyline" / name


def min_ready_number(text: str) -> int | None:
    """Read --min-ready: None stands for all.

    Raises:
        typer.BadParameter: neither a positive number nor `all`.
    """
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST):
        raise typer.BadParameter(f"--min-ready {text!r} is neither a number >= 1 nor 'all'")
    return int(text)


def listen_address(text: str) -> tuple[str, int]:
    """Host and port of a `--listen`; an IPv6 host may stand in brackets.

    Raises:
        typer.BadParameter: it has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise typer.BadParameter(f"--listen {text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
