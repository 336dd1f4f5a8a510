"""Projections in bounded memory: rows touched last are kept, others lie in a temporary file.

A ledger of a million events has hundreds of thousands of rows; folding touches a few at a time.
"""

from __future__ import annotations

import dataclasses
import pickle
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ledger.rows import LineRow, ReplicaRow, ResidencyRow, Row

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
        if row is None and table not in _LASTING:
            found = self._database.execute(
                "SELECT row FROM rows WHERE place = ?", (_text(place),)
            ).fetchone()
            if found is not None:
                row = table(*pickle.loads(found[0]))  # noqa: S301 - written by this object
        return row if isinstance(row, table) else None

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
            yield table(*pickle.loads(blob))  # noqa: S301 - written by this object

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


_LASTING = (LineRow, ReplicaRow)


def _text(place: _Place) -> str:
    table, key = place
    return "\0".join((table, *map(str, key)))


def _blob(row: Row) -> bytes:
    values = [getattr(row, f.name) for f in dataclasses.fields(row)]
    return pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL)
