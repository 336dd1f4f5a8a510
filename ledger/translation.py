"""The database's errors in the ledger's words: one place, for every driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from ledger.errors import Conflict, Corrupted, LedgerError, LedgerUnavailable

_REQUEST_TWICE: Final = re.compile(r"rollouts[._]request")
"""SQLite names the columns of a unique constraint, Postgres the constraint."""


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
        raise _translated(error.orig, shown_url, dbapi) from error
    except dbapi.Error as error:
        raise _translated(error, shown_url, dbapi) from error
    except sa.exc.TimeoutError as error:
        raise LedgerUnavailable(
            f"ledger {shown_url}: every connection of this process is in use"
        ) from error


def _translated(error: BaseException | None, shown_url: str, dbapi: Any) -> LedgerError:
    text = f"{str(error).strip():.200}"
    if isinstance(error, dbapi.IntegrityError) and _REQUEST_TWICE.search(text):
        return Conflict(f"a request of this batch was recorded before, in another batch: {text}")
    if isinstance(error, dbapi.IntegrityError | dbapi.DataError):
        return Corrupted(f"ledger {shown_url} refused a row: {text}")
    if "not a database" in text or "malformed" in text:
        return Corrupted(
            f"{shown_url} is damaged or no ledger: {text}",
            hint="restore it from a backup, see docs/backup.md",
        )
    return LedgerUnavailable(
        f"ledger {shown_url} is unavailable: {text}",
        hint="check that it is running, not full, and that this user may write to it",
    )
