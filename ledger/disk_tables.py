"""Projections in bounded memory: rows touched last are kept, others lie in a temporary file.

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
from types import TracebackType
from typing import Self, TypeVar

from policyline.ledger.rows import ROW_TYPES, LineRow, ReplicaRow, ResidencyRow, Row

R = TypeVar("R", bound=Row)
_Place = tuple[str, tuple[str | int, ...]]

KEPT_ROWS = 20_000
"""About 20 MB; a fleet of 64 replicas with a window of 6 touches under a thousand."""


class SpillTables:
    """`fold.Tables` that spills. Use as a context manager: it removes its file.

    Lines and replicas are never spilled, and `acked` holds the acks in force, as in
    `MemoryTables`.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="policyline-fold-")
        self._database = sqlite3.connect(
            Path(self._directory.name) / "rows.db", isolation_level=None
        )
        for pragma in ("journal_mode = OFF", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute(
            "CREATE TABLE rows (place TEXT PRIMARY KEY, kind TEXT, row BLOB) WITHOUT ROWID"
        )
        self._kept: dict[_Place, Row] = {}
        self._spilled: set[int] = set()
        """Hashes of the places that were written out: most rows asked for are new instead."""
        self._lasting: dict[_Place, Row] = {}
        self.acked: dict[tuple[str, str, int], ResidencyRow] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._database.close()
        self._directory.cleanup()

    def get(self, table: type[R], key: tuple[str | int, ...]) -> R | None:
        """The row, or None."""
        place = (table.table, key)
        row = self._lasting.get(place) or self._kept.get(place)
        if row is None and hash(place) in self._spilled:
            row = self._read(table, [key]).get(key)
        return row if isinstance(row, table) else None

    def get_many(
        self, table: type[R], keys: Sequence[tuple[str | int, ...]]
    ) -> dict[tuple[str | int, ...], R]:
        """Those of the rows that there are, by key; of many at once, for a walk over all."""
        if table in _LASTING:
            return {k: row for k in keys if (row := self.get(table, k)) is not None}
        self._spill(len(self._kept))
        return self._read(table, keys)

    def _read(
        self, table: type[R], keys: Sequence[tuple[str | int, ...]]
    ) -> dict[tuple[str | int, ...], R]:
        places = [_text((table.table, key)) for key in keys]
        marks = ",".join("?" * len(places))
        query = f"SELECT row FROM rows WHERE place IN ({marks})"  # noqa: S608 - only marks
        found = [_row(table, blob) for (blob,) in self._database.execute(query, places)]
        return {row.key: row for row in found}

    def put(self, row: Row) -> None:
        """Insert or replace the row."""
        place = (row.table, row.key)
        if isinstance(row, _LASTING):
            self._lasting[place] = row
            return
        if isinstance(row, ResidencyRow):
            self.acked.pop(row.key, None)
            if row.state == "acked":
                self.acked[row.key] = row
        self._kept.pop(place, None)
        self._kept[place] = row
        if len(self._kept) > 2 * KEPT_ROWS:
            self._spill(KEPT_ROWS)

    def rows(self, table: type[R]) -> Iterator[R]:
        """Every row of a table, in no order."""
        for row in self._lasting.values():
            if isinstance(row, table):
                yield row
        if table in _LASTING:
            return
        self._spill(len(self._kept))
        query = "SELECT row FROM rows WHERE kind = ?"
        for (blob,) in self._database.execute(query, (table.table,)):
            yield _row(table, blob)

    def count(self, table: type[Row]) -> int:
        """How many rows a table has."""
        if table in _LASTING:
            return sum(isinstance(row, table) for row in self._lasting.values())
        self._spill(len(self._kept))
        query = "SELECT count(*) FROM rows WHERE kind = ?"
        return int(self._database.execute(query, (table.table,)).fetchone()[0])

    def _spill(self, count: int) -> None:
        """Write out the `count` rows that were not touched for longest."""
        oldest = [place for place, _ in zip(self._kept, range(count), strict=False)]
        self._database.execute("BEGIN")
        self._database.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?)",
            [(_text(p), p[0], _blob(self._kept.pop(p))) for p in oldest],
        )
        self._database.execute("COMMIT")
        self._spilled.update(map(hash, oldest))


_LASTING = (LineRow, ReplicaRow)


def _text(place: _Place) -> str:
    table, key = place
    return "\0".join((table, *map(str, key)))


def _blob(row: Row) -> bytes:
    return pickle.dumps(_VALUES[type(row)](row), protocol=pickle.HIGHEST_PROTOCOL)


def _row(table: type[R], blob: bytes) -> R:
    return table(*pickle.loads(blob))  # noqa: S301 - written by `_blob`


_VALUES = {t: attrgetter(*(f.name for f in dataclasses.fields(t))) for t in ROW_TYPES}
