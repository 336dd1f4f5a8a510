"""One open ledger database: its connections, its signal, and the errors of both in our words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Self

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.db import migrate, schema
from policyline.ledger.db.append_lock import take_lock
from policyline.ledger.db.connect import connect_shared, connect_to_write, ledger_url, writes
from policyline.ledger.db.db_errors import translating
from policyline.ledger.db.follower import Follower
from policyline.ledger.db.signals import Signal, signal_for
from policyline.ledger.db.sqlite_file import OpenedFile
from policyline.ledger.errors import Corrupted, LedgerUnavailable

PAGE_ROWS: Final = 2000
"""Rows that one query takes: memory does not grow with the ledger."""


class Database:
    """A ledger's database, opened: the base of everything that reads and appends.

    Args:
        url: `sqlite:///file.db`, a plain path, or `postgresql://user@host/name`.

    Raises:
        InvalidUrl: it names no database a ledger can live in, or its driver is not installed.
        LedgerUnavailable: the database cannot be reached.
        SchemaMismatch: it has another schema; run `policyline ledger upgrade`.
    """

    def __init__(self, url: str) -> None:
        parsed = ledger_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        """Whether the database is a SQLite file; otherwise it is Postgres."""
        self.shown_url = parsed.render_as_string(hide_password=True)
        """The URL without its password."""
        self._engine = connect_shared(parsed)
        # every read is one snapshot: at READ COMMITTED, Postgres takes a new one for each
        # statement, and an answer of several would mix the states at two events
        self._snapshots = self._engine
        if not self.is_sqlite:
            self._snapshots = self._engine.execution_options(isolation_level="REPEATABLE READ")
        self._write_connection = connect_to_write(self._engine) if self.is_sqlite else None
        self._signal = signal_for(self._engine)
        self._file: OpenedFile | None = None
        try:
            if self.is_sqlite:
                self._file = self._open_file(Path(parsed.database or ""))
            with self._reading() as connection:
                migrate.check(connection, self.shown_url)
                self._ledger_id = self._head(connection)[0]
        except BaseException:
            self.close()
            raise

    def _open_file(self, path: Path) -> OpenedFile:
        if not path.exists():
            raise LedgerUnavailable(
                f"ledger {self.shown_url} does not exist",
                hint=f"run: policyline ledger upgrade --ledger {shlex.quote(self.shown_url)}",
            )
        return OpenedFile(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        if self._write_connection is not None:
            self._write_connection.close()
        self._engine.dispose()

    @property
    def ledger_id(self) -> str:
        """The ledger's identity (32 hex digits); the same in a restored copy."""
        return self._ledger_id

    @property
    def signal(self) -> Signal:
        """What wakes readers after a commit."""
        return self._signal

    def follow(self, *, poll_s: float | None, details: bool = True) -> Follower:
        """Iterate over the moments at which to read this ledger again; see `Follower`.

        Args:
            poll_s: longest wait between two reads in seconds; None for no poll.
            details: also wake for what leaves every desired set as it is.
        """
        return Follower(self.signal, poll_s=poll_s, details=details)

    @contextmanager
    def exclusive(self) -> Iterator[Connection]:
        """A plain transaction that holds the ledger's lock, for bulk work; commits at the end."""
        with self._translating():
            with self._engine.connect() as plain:
                connection = plain.execution_options(**writes(self._engine))
                take_lock(connection)
                yield connection
                connection.commit()
            self._signal.after_commit()

    def _head(self, connection: Connection) -> tuple[str, int, str]:
        """(ledger_id, seq, hash) as of the last event."""
        found = connection.execute(sa.select(schema.head)).mappings().first()
        if found is None:
            raise Corrupted(f"ledger {self.shown_url} has lost its head row")
        return found["ledger_id"], found["seq"], found["hash"]

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A read transaction that is one snapshot."""
        with self._translating(), self._snapshots.connect() as connection, connection.begin():
            yield connection

    def _streamed(
        self,
        query: sa.Select[Any],
        by: sa.Column[Any],
        *,
        after: int = 0,
        limit: int | None = None,
    ) -> Iterator[sa.RowMapping]:
        """What a query finds, by a unique number after `after`; each page is its own snapshot."""
        while limit is None or limit > 0:
            size = PAGE_ROWS if limit is None else min(PAGE_ROWS, limit)
            page = query.where(by > after).order_by(by).limit(size)
            with self._reading() as connection:
                rows = connection.execute(page).mappings().all()
            yield from rows
            if len(rows) < size:
                return
            limit = None if limit is None else limit - size
            after = rows[-1][by.name]

    def _translating(self) -> AbstractContextManager[None]:
        if self._file is not None:
            self._file.check()
        return translating(self._engine, self.shown_url)
