"""A ledger that is not there yet: created on SQLite, left alone on Postgres."""

from __future__ import annotations

import logging
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from policyline.ledger import Ledger, create_if_missing
from policyline.ledger.errors import InvalidUrl, LedgerUnavailable, SchemaMismatch


def test_a_missing_file_and_its_directory_are_created_once_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "new" / "deep" / "run.db")
    with caplog.at_level(logging.INFO):
        assert create_if_missing(url)
        assert not create_if_missing(url)
    assert [r.__dict__.get("event") for r in caplog.records].count("ledger_created") == 1
    with Ledger(url) as ledger:
        assert ledger.reserve(ledger.open_run("r1")).version == 1


def test_an_empty_file_counts_as_missing(tmp_path: Path) -> None:
    url = tmp_path / "run.db"
    url.touch()
    assert create_if_missing(str(url))
    Ledger(str(url)).close()


def test_a_file_whose_tables_another_process_is_about_to_create_counts_as_missing(
    tmp_path: Path,
) -> None:
    """It has a size already: that of a database without tables."""
    url = tmp_path / "run.db"
    with closing(sqlite3.connect(url)) as other:
        other.execute("PRAGMA journal_mode=WAL")
        assert url.stat().st_size > 0
        assert create_if_missing(str(url))
    Ledger(str(url)).close()


def test_postgres_is_upgraded_explicitly(bare_postgres_url: str) -> None:
    assert not create_if_missing(bare_postgres_url)
    with pytest.raises(SchemaMismatch, match="policyline ledger upgrade"):
        Ledger(bare_postgres_url)


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerUnavailable, match=r"file.*cannot be created"):
        create_if_missing(str(tmp_path / "file" / "deep" / "run.db"))


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidUrl, match=r"pip install 'policyline\[postgres\]'"):
        Ledger("postgresql://user@127.0.0.1:1/db")
