"""Disk-backed tables: projections in bounded memory, the oldest rows in a temporary file.

A ledger of a million events has hundreds of thousands of rows; folding touches a few at a time.
"""

from __future__ import annotations

import dataclasses
import pickle
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Self, TypeVar

from policyline.ledger.rows import ROW_TYPES, LineRow, ReplicaRow, ResidencyRow, Row

R = TypeVar("R", bound=Row)
_RowId = tuple[str, tuple[str | int, ...]]

ROWS_IN_MEMORY = 20_000
"""About 20 MB; a fleet of 64 replicas with a window of 6 touches under a thousand."""


class DiskProjections:
    """`ProjectionStore` that spills to disk. Use as a context manager: it removes its file.

    Lines and replicas are never spilled, and `acked` holds the acks in force, as in
    `InMemoryProjections`.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="policyline-fold-")
        self._database = sqlite3.connect(
            Path(self._directory.name) / "rows.db", isolation_level=None
        )
        for pragma in ("journal_mode = OFF", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute(
            "CREATE TABLE rows (id TEXT PRIMARY KEY, kind TEXT, row BLOB) WITHOUT ROWID"
        )
        self._recent: dict[_RowId, Row] = {}
        self._spilled: set[int] = set()
        """Hashes of the ids that were written out: most rows asked for are new instead."""
        self._in_memory: dict[_RowId, Row] = {}
        self.acked: dict[tuple[str, str, int], ResidencyRow] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._database.close()
        self._directory.cleanup()

    def get(self, table: type[R], key: tuple[str | int, ...]) -> R | None:
        """The row, or None."""
        row_id = (table.table, key)
        row = self._in_memory.get(row_id) or self._recent.get(row_id)
        if row is None and hash(row_id) in self._spilled:
            row = self._read(table, [key]).get(key)
        return row if isinstance(row, table) else None

    def get_many(
        self, table: type[R], keys: Sequence[tuple[str | int, ...]]
    ) -> dict[tuple[str | int, ...], R]:
        """Those of the rows that there are, by key; of many at once, for a walk over all."""
        if table in _NEVER_SPILLED:
            return {k: row for k in keys if (row := self.get(table, k)) is not None}
        self._spill(len(self._recent))
        return self._read(table, keys)

    def _read(
        self, table: type[R], keys: Sequence[tuple[str | int, ...]]
    ) -> dict[tuple[str | int, ...], R]:
        ids = [_text((table.table, key)) for key in keys]
        marks = ",".join("?" * len(ids))
        query = f"SELECT row FROM rows WHERE id IN ({marks})"  # noqa: S608 - only marks
        found = [_row(table, blob) for (blob,) in self._database.execute(query, ids)]
        return {row.key: row for row in found}

    def put(self, row: Row) -> None:
        """Insert or replace the row."""
        row_id = (row.table, row.key)
        if isinstance(row, _NEVER_SPILLED):
            self._in_memory[row_id] = row
            return
        if isinstance(row, ResidencyRow):
            self.acked.pop(row.key, None)
            if row.state == "acked":
                self.acked[row.key] = row
        self._recent.pop(row_id, None)
        self._recent[row_id] = row
        if len(self._recent) > 2 * ROWS_IN_MEMORY:
            self._spill(ROWS_IN_MEMORY)

    def rows(self, table: type[R]) -> Iterator[R]:
        """Every row of a table, in no order."""
        for row in self._in_memory.values():
            if isinstance(row, table):
                yield row
        if table in _NEVER_SPILLED:
            return
        self._spill(len(self._recent))
        query = "SELECT row FROM rows WHERE kind = ?"
        for (blob,) in self._database.execute(query, (table.table,)):
            yield _row(table, blob)

    def count(self, table: type[Row]) -> int:
        """How many rows a table has."""
        if table in _NEVER_SPILLED:
            return sum(isinstance(row, table) for row in self._in_memory.values())
        self._spill(len(self._recent))
        query = "SELECT count(*) FROM rows WHERE kind = ?"
        return int(self._database.execute(query, (table.table,)).fetchone()[0])

    def _spill(self, count: int) -> None:
        """Write out the `count` rows that were not touched for longest."""
        oldest = [row_id for row_id, _ in zip(self._recent, range(count), strict=False)]
        self._database.execute("BEGIN")
        self._database.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?)",
            [(_text(p), p[0], _blob(self._recent.pop(p))) for p in oldest],
        )
        self._database.execute("COMMIT")
        self._spilled.update(map(hash, oldest))


_NEVER_SPILLED = (LineRow, ReplicaRow)


def _text(row_id: _RowId) -> str:
    table, key = row_id
    return "\0".join((table, *map(str, key)))


def _blob(row: Row) -> bytes:
    return pickle.dumps(_VALUES[type(row)](row), protocol=pickle.HIGHEST_PROTOCOL)


def _row(table: type[R], blob: bytes) -> R:
    return table(*pickle.loads(blob))  # noqa: S301 - written by `_blob`


_VALUES = {t: attrgetter(*(f.name for f in dataclasses.fields(t))) for t in ROW_TYPES}
