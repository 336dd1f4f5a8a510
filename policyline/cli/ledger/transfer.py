"""Verbs that move or mend a ledger: export, import, repair-projections."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from policyline.cli.options import LedgerOption
from policyline.ledger import Ledger
from policyline.ledger.errors import LedgerUnavailable, Refused
from policyline.ledger.transfer import export, import_into, repair_projections

FileArgument = Annotated[Path, typer.Argument(help="File of lines of JSON; - for stdin or stdout.")]


def export_ledger(file: FileArgument, ledger: LedgerOption) -> None:
    """Write the whole ledger as lines of JSON into a new file. It may be in use meanwhile."""
    with Ledger(ledger) as opened:
        if str(file) == "-":
            for line in export(opened):
                sys.stdout.write(line + "\n")
            return
        if file.exists() or file.is_symlink():  # it may be the ledger itself
            raise typer.BadParameter(f"{file} exists; remove it, or name another file")
        try:
            _write(file, export(opened))
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
                raise LedgerUnavailable(
                    f"{file} cannot be written: {error.strerror}",
                    hint="make room, or name a file on another disk; no part of it was left",
                ) from error
            raise typer.BadParameter(f"{file} cannot be written: {error.strerror}") from error
    sys.stderr.write(f"exported to {file}\n")


def _write(file: Path, lines: Iterator[str]) -> None:
    """All of them, or leave no file."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        try:
            for line in lines:
                out.write(line + "\n")
            out.close()
            partial.rename(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def import_ledger(file: FileArgument, ledger: LedgerOption) -> None:
    """Fill an empty, upgraded ledger from an export; hashes stay the same. All or nothing."""
    with Ledger(ledger) as opened:
        if str(file) == "-":
            count = import_into(opened, sys.stdin, on_progress=_show_progress)
        else:
            try:
                with file.open(encoding="utf-8") as lines:
                    count = import_into(opened, lines, on_progress=_show_progress)
            except OSError as error:
                raise typer.BadParameter(f"{file} cannot be read: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise Refused(f"{file} is not an export of a ledger: it is no text") from error
    sys.stdout.write(f"imported {count} events\n")


def repair(ledger: LedgerOption) -> None:
    """Rebuild every projection from the events; the events themselves are not touched."""
    with Ledger(ledger) as opened:
        count = repair_projections(opened)
    sys.stdout.write(f"projections rebuilt from {count} events\n")


def _show_progress(seq: int) -> None:
    if seq % 50_000 == 0:
        sys.stderr.write(f"{seq} events\n")
