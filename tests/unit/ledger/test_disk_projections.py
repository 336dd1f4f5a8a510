"""Rows that spill are the rows that were put."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policyline.ledger import disk_projections
from policyline.ledger.disk_projections import DiskProjections
from policyline.ledger.rows import LineRow, ResidencyRow, VersionRow


def _row(version: int) -> VersionRow:
    return VersionRow("l", version, "r", 1, "a", "reserved", "p", version)


def test_rows_come_back_from_the_file_and_newer_ones_replace_older(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_projections, "ROWS_IN_MEMORY", 3)
    with DiskProjections() as tables:
        for version in range(1, 51):
            tables.put(_row(version))
        tables.put(replace(_row(2), state="published"))
        for version in range(51, 100):
            tables.put(_row(version))
        assert tables.get(VersionRow, ("l", 1)) == _row(1)
        assert tables.get(VersionRow, ("l", 2)) == replace(_row(2), state="published")
        assert tables.get(VersionRow, ("l", 100)) is None
        assert tables.get(VersionRow, ("m", 1)) is None
        assert tables.get(ResidencyRow, ("l", "r", 1)) is None
        keys = [("l", 2), ("l", 99), ("l", 100)]
        assert {k: r.state for k, r in tables.get_many(VersionRow, keys).items()} == {
            ("l", 2): "published",
            ("l", 99): "reserved",
        }
        assert sorted(r.version for r in tables.rows(VersionRow)) == list(range(1, 100))
        assert tables.count(VersionRow) == 99


def test_lines_stay_in_memory() -> None:
    with DiskProjections() as tables:
        tables.put(LineRow("l"))
        tables.put(LineRow("l", current=3))
        assert tables.get_many(LineRow, [("l",), ("m",)]) == {("l",): LineRow("l", current=3)}
        assert tables.count(LineRow) == 1
