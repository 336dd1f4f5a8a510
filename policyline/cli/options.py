"""Options that several commands share, each with its environment variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from policyline import ledger, storage

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
        help="Where versions are stored: a directory (local or mounted) or its URL.",
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
TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over",
        envvar="POLICYLINE_TAKE_OVER",
        help="Fence a live publisher of the run instead of stopping.",
    ),
]


def create_missing(ledger_url: str, storage_url: str) -> None:
    """Create a local ledger and a storage directory at their first use, and log that.

    A ledger on Postgres must be there: `policyline ledger upgrade` makes it, with the owner's role.

    Raises:
        LedgerError, StorageError: one of them cannot be created, or its URL cannot be used.
    """
    storage.open_storage(storage_url)  # a URL that cannot be used leaves no new ledger behind
    ledger.create_if_missing(ledger_url)
    storage.create_if_missing(storage_url)


def default_cache(name: str) -> Path:
    """Where `name` is stored without an option: XDG's cache directory of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "policyline" / name
