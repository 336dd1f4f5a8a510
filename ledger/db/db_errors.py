"""The database's errors in the ledger's words: one place, for every driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from policyline.ledger.errors import (
    BACKUP_HINT,
    Conflict,
    Corrupted,
    InvalidUrl,
    LedgerError,
    LedgerUnavailable,
    Refused,
)

_REQUEST_TWICE: Final = re.compile(r"rollouts[._]request")
"""SQLite names the columns of a unique constraint, Postgres the constraint."""
_MISSING: Final = re.compile(
    r"no such (?P<what>table|column): (?:main\.)?(?P<name>[\w.]+)"
    r'|(?P<pg_what>relation|column) "?(?P<pg_name>[\w.]+)"? does not exist'
)
"""SQLite's words for what was dropped, and Postgres'."""


_INSUFFICIENT_PRIVILEGE: Final = "42501"


@contextmanager
def translating(engine: Engine, shown_url: str) -> Iterator[None]:
    """Turn the driver's errors into ours.

    Args:
        engine: whose driver it is.
        shown_url: without the password.
    """
    dbapi = engine.dialect.loaded_dbapi
    try:
        yield
    except sa.exc.DBAPIError as error:
        raise _translated(error.orig, engine, shown_url) from error
    except dbapi.Error as error:
        raise _translated(error, engine, shown_url) from error
    except sa.exc.TimeoutError as error:
        raise LedgerUnavailable(
            f"ledger {shown_url}: every connection of this process is in use"
        ) from error


def _translated(error: BaseException | None, engine: Engine, shown_url: str) -> LedgerError:
    dbapi = engine.dialect.loaded_dbapi
    text = f"{str(error).strip():.200}"
    if isinstance(error, dbapi.IntegrityError) and _REQUEST_TWICE.search(text):
        return Conflict(f"a request of this batch was recorded before, in another batch: {text}")
    if isinstance(error, dbapi.IntegrityError | dbapi.DataError):
        return Corrupted(f"ledger {shown_url} refused a row: {text}")
    if "not a database" in text or "malformed" in text:
        return Corrupted(f"{shown_url} is damaged or no ledger: {text}", hint=BACKUP_HINT)
    if missing := _MISSING.search(text):
        what = "column" if "column" in (missing["what"], missing["pg_what"]) else "table"
        name = missing["name"] or missing["pg_name"]
        return Corrupted(
            f"ledger {shown_url} is damaged: its {what} {name} is missing", hint=BACKUP_HINT
        )
    if engine.dialect.name == "sqlite" and engine.url.database:
        return _of_a_file(text, Path(engine.url.database), shown_url)
    return _of_a_server(error, text, shown_url)


def _of_a_server(error: BaseException | None, text: str, shown_url: str) -> LedgerError:
    if getattr(error, "sqlstate", None) == _INSUFFICIENT_PRIVILEGE:
        return Refused(
            f"ledger {shown_url}: {text}",
            hint="connect as a role that may, see docs/postgres.md: the owner migrates, the writer "
            "appends and imports, the reader asks",
        )
    return LedgerUnavailable(
        f"ledger {shown_url} is unavailable: {text}",
        hint="check that it is running, not full, and that this user may write to it",
    )


def _of_a_file(text: str, path: Path, shown_url: str) -> LedgerError:
    """SQLite reports "unable to open database file" for everything that is missing."""
    if path.is_dir():
        return InvalidUrl(
            f"ledger {shown_url} is a directory", hint=f"name a file in it: {path / 'ledger.db'}"
        )
    hint = f"check that the disk is not full, and that this user may write to {path}"
    if "locked" in text:
        hint = f"a process holds its lock and does not go on: see fuser {path}"
    if path.exists() and not os.access(path, os.R_OK):
        hint = f"check that this user may read and write {path}"
    elif not os.access(path.parent, os.W_OK):
        hint = (
            "SQLite writes files next to the ledger, even to read it: check that this user may "
            f"write to the directory {path.parent}, and that it is neither read-only nor immutable"
        )
    return LedgerUnavailable(f"ledger {shown_url} is unavailable: {text}", hint=hint)
