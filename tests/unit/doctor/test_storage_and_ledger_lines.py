"""What is said of a storage and a ledger, by table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policyline.doctor.ledger import ledger_lines, window_lines, window_of
from policyline.doctor.model import Failure, Line, Report, Status, Window
from policyline.doctor.storage import storage_lines
from policyline.ledger.roundtrip import RoundTrip
from tests.unit.doctor.builders import LEDGER, STORAGE, by_name

DEAD = Failure("nobody there", "start it", unreachable=True)


def test_healthy_things_pass_everything() -> None:
    lines = [*storage_lines(STORAGE), *ledger_lines(LEDGER)]

    assert {line.status for line in lines} == {"pass", "note"}


@pytest.mark.parametrize(
    ("changes", "name", "status", "value", "remedy"),
    [
        ({"failure": DEAD}, "reachable", "fail", "nobody there", "start it"),
        ({"measurable": False}, "read_after_write", "skip", "only directories", ""),
        ({"free_bytes": 1000}, "space", "warn", "0.0 GB", "free space"),
        ({"written_s": None}, "read_after_write", "fail", "does not show", "same storage"),
        ({"written_s": None, "torn": 9}, "read_after_write", "fail", "other bytes", "same storage"),
        ({"torn": 2}, "read_after_write", "pass", "seen 2 times", ""),
        ({"written_s": 12.0}, "read_after_write", "warn", "12.0 s", "caching"),
        ({"renamed_s": None}, "rename", "fail", "not seen within 30 s", "renames"),
        ({"renamed_s": 2.5}, "rename", "warn", "2.5 s", "caching"),
        ({"missing_s": 29.0}, "missing_remembered", "warn", "29.0 s", "negative"),
        ({"missing_s": None}, "missing_remembered", "warn", "more than 30 s", "negative"),
        ({"has_events": False}, "file_events", "note", "do not arrive", ""),
        ({"reader_writable": True}, "sidecar_read_only", "warn", "/mnt/b", "read-only"),
        (
            {"reader_writable": None, "reader_unknown": "a write to it failed: Stale file handle"},
            "sidecar_read_only",
            "skip",
            "/mnt/b: a write to it failed: Stale file handle",
            "give --sidecar-storage the mount that the sidecar reads",
        ),
        ({"left": "/mnt/a/.x"}, "left", "warn", "/mnt/a/.x", "by hand"),
    ],
)
def test_each_finding_of_a_storage(
    changes: dict[str, Any], name: str, status: Status, value: str, remedy: str
) -> None:
    line = by_name(storage_lines(replace(STORAGE, **changes)))[f"storage.{name}"]

    assert line.status == status
    assert value in line.value
    assert remedy in line.remedy


def test_one_view_says_nothing_of_the_sidecars_side() -> None:
    lines = by_name(storage_lines(replace(STORAGE, read=STORAGE.written, reader_writable=None)))

    assert "storage.sidecar_read_only" not in lines


@pytest.mark.parametrize(
    ("changes", "name", "status", "text"),
    [
        ({"failure": DEAD}, "reachable", "fail", "start it"),
        ({"schema_mismatch": Failure("old", "upgrade")}, "schema", "fail", "upgrade"),
        ({"round_trip": RoundTrip(0.9, 0.9)}, "write", "warn", "slow"),
        ({"round_trip": RoundTrip(0.001, None)}, "signal", "warn", "inotify"),
        (
            {"round_trip": RoundTrip(0.001, None), "is_sqlite": False},
            "signal",
            "warn",
            "pooler",
        ),
        ({"round_trip": Failure("readonly", "may write")}, "write", "fail", "may write"),
    ],
)
def test_each_finding_of_a_ledger(
    changes: dict[str, Any], name: str, status: Status, text: str
) -> None:
    line = by_name(ledger_lines(replace(LEDGER, **changes)))[f"ledger.{name}"]

    assert (line.status, text in line.remedy) == (status, True)


def test_the_window_is_the_options_else_the_runs_else_the_default() -> None:
    assert window_of(LEDGER, 1, 4) == Window(1, "--max-staleness")
    assert window_of(LEDGER, None, 4) == Window(2, "run 'grpo-7'")
    assert window_of(None, None, 4) == Window(4, "the default")
    assert window_of(replace(LEDGER, view=None), None, 4).max_staleness == 4


def test_an_option_against_the_open_run_is_told() -> None:
    assert [line.status for line in window_lines(LEDGER, Window(1, "--max-staleness"))] == ["warn"]
    assert list(window_lines(LEDGER, Window(2, "run 'grpo-7'"))) == []
    assert list(window_lines(None, Window(2, "x"))) == []


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], 0),
        ([Line("warn", "a", ""), Line("skip", "b", "")], 0),
        ([Line("fail", "a", "")], 1),
        ([Line("fail", "a", ""), Line("fail", "b", "", unreachable=True)], 3),
    ],
)
def test_the_exit_code(lines: list[Line], code: int) -> None:
    assert Report(tuple(lines)).exit_code == code
