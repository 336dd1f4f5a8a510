"""The tables that events are folded into: by key only, and one kind that is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from policyline.ledger.rows import ResidencyRow, Row

R = TypeVar("R", bound=Row)


class ProjectionStore(Protocol):
    """Projections that can be read and written by key."""

    def get(self, table: type[R], key: tuple[str | int, ...]) -> R | None:
        """The row, or None."""

    def put(self, row: Row) -> None:
        """Insert or replace the row."""


class InMemoryProjections:
    """Projections in memory, for replay and verification."""

    def __init__(self) -> None:
        self._rows: dict[type[Row], dict[tuple[str | int, ...], Row]] = {}
        self.acked: dict[tuple[str, str, int], ResidencyRow] = {}
        """The residency rows in state `acked`: few, and asked for again and again."""

    def get(self, table: type[R], key: tuple[str | int, ...]) -> R | None:
        """The row, or None."""
        row = self._rows.get(table, {}).get(key)
        return row if isinstance(row, table) else None

    def put(self, row: Row) -> None:
        """Insert or replace the row."""
        self._rows.setdefault(type(row), {})[row.key] = row
        if isinstance(row, ResidencyRow):
            self.acked.pop(row.key, None)
            if row.state == "acked":
                self.acked[row.key] = row

    def rows(self, table: type[R]) -> Iterator[R]:
        """Every row of a table."""
        return iter(self.all(table).values())

    def all(self, table: type[R]) -> dict[tuple[str | int, ...], R]:
        """Every row of a table by key."""
        return {k: r for k, r in self._rows.get(table, {}).items() if isinstance(r, table)}
