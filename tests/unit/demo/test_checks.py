"""Each check notices what it is there to notice."""

import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.demo import checks, fleet
from policyline.demo.checks import EngineView
from policyline.demo.client import Traffic
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.manifest import MANIFEST_NAME
from tests.behind_the_back import run_sql
from tests.ledger_builders import FACTS, LINE, acknowledge, publish

NAMES = ("trl-policy-v2", "trl-policy-v3")
LOW = (-1.0, -2.0, -3.0)
HIGH = (-1.5, -2.5, -3.5)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Three versions on two replicas; with `max_staleness=1` the first has left the window."""
    url = str(tmp_path / "ledger.db")
    upgrade_url(url)
    with Ledger(url) as opened:
        claim = opened.open_run("demo", settings=RunSettings(max_staleness=1))
        members = [opened.join(LINE, replica, FACTS) for replica in ("r0", "r1")]
        for _ in range(3):
            manifest = publish(opened, claim)
            folder = tmp_path / "storage" / manifest.name
            folder.mkdir(parents=True)
            (folder / MANIFEST_NAME).write_text(manifest.to_text())
            (folder / manifest.files[0].path).write_text(f"version {manifest.version}")
            for member in members:
                acknowledge(opened, member, manifest)
        yield opened


@pytest.fixture
def view(ledger: Ledger) -> LineSnapshot:
    return ledger.view(LINE)


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, EngineView]:
    return {
        replica: EngineView(
            paths={name: str(tmp_path / "storage" / name) for name in NAMES},
            scores=dict(zip(NAMES, (LOW, HIGH), strict=True)),
        )
        for replica in ("r0", "r1")
    }


def test_all_is_well(
    ledger: Ledger, view: LineSnapshot, engines: dict[str, EngineView], tmp_path: Path
) -> None:
    rows = ledger.versions(run="demo")
    found = [
        checks.window_served(view, engines, newest=3),
        checks.answers_differ(view, engines),
        checks.out_of_window_evicted(view, rows, engines),
        checks.no_request_failed(Traffic(answered=Counter({2: 5}))),
        checks.digests_agree(rows, tmp_path / "storage", engines),
        checks.replay_equals_tables(ledger),
    ]
    assert [check for check in found if not check.ok] == []
    assert "7 directories" in found[4].detail


def test_window_served_notices_a_version_that_an_engine_does_not_list(
    view: LineSnapshot, engines: dict[str, EngineView]
) -> None:
    del engines["r1"].paths["trl-policy-v2"]
    check = checks.window_served(view, engines, newest=3)
    assert (check.ok, check.detail) == (False, "r1 does not list trl-policy-v2")


def test_window_served_notices_a_replica_without_acks(
    view: LineSnapshot, engines: dict[str, EngineView]
) -> None:
    check = checks.window_served(view, {**engines, "r2": engines["r0"]}, newest=3)
    assert not check.ok
    assert "trl-policy-v3 has no ack of r2" in check.detail


def test_window_served_notices_that_the_newest_never_became_current(
    view: LineSnapshot, engines: dict[str, EngineView]
) -> None:
    assert not checks.window_served(view, engines, newest=4).ok


def test_answers_differ_notices_neighbours_that_answer_alike(
    view: LineSnapshot, engines: dict[str, EngineView]
) -> None:
    engines["r0"].scores["trl-policy-v3"] = LOW
    engines["r1"].scores["trl-policy-v3"] = LOW
    check = checks.answers_differ(view, engines)
    assert not check.ok
    assert "trl-policy-v2 and trl-policy-v3 differ by only 0 on r0" in check.detail


def test_answers_differ_notices_replicas_that_disagree(
    view: LineSnapshot, engines: dict[str, EngineView]
) -> None:
    engines["r1"].scores["trl-policy-v3"] = tuple(score + 0.02 for score in HIGH)
    check = checks.answers_differ(view, engines)
    assert (check.ok, check.detail) == (False, "r0 and r1 differ by 0.02 under trl-policy-v3")


def test_answers_differ_notices_a_missing_answer(
    view: LineSnapshot, engines: dict[str, EngineView]
) -> None:
    del engines["r1"].scores["trl-policy-v2"]
    assert not checks.answers_differ(view, engines).ok


def test_out_of_window_evicted_notices_a_version_that_is_still_listed(
    ledger: Ledger, view: LineSnapshot, engines: dict[str, EngineView]
) -> None:
    engines["r0"].paths["trl-policy-v1"] = "/somewhere"
    check = checks.out_of_window_evicted(view, ledger.versions(run="demo"), engines)
    assert (check.ok, check.detail) == (False, "r0 still lists trl-policy-v1")


def test_no_request_failed_notices_a_failure_and_silence() -> None:
    failed = Traffic(answered=Counter({1: 9}), failures=["r0 trl-policy-v1: gone"])
    assert checks.no_request_failed(failed).detail == "r0 trl-policy-v1: gone"
    assert not checks.no_request_failed(Traffic()).ok


@pytest.mark.parametrize("place", ["storage", "cache"])
def test_digests_agree_notices_other_bytes(
    ledger: Ledger, engines: dict[str, EngineView], tmp_path: Path, place: str
) -> None:
    if place == "cache":
        folder = tmp_path / "cache"
        folder.mkdir()
        engines["r1"].paths["trl-policy-v3"] = str(folder)
    else:
        folder = tmp_path / "storage" / "trl-policy-v3"
    (folder / "adapter_model.safetensors").write_text("version X")
    check = checks.digests_agree(ledger.versions(run="demo"), tmp_path / "storage", engines)
    assert not check.ok
    assert f"{folder}/adapter_model.safetensors does not have" in check.detail


def test_digests_agree_notices_another_manifest(ledger: Ledger, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    other = (storage / "trl-policy-v1" / MANIFEST_NAME).read_text()
    (storage / "trl-policy-v2" / MANIFEST_NAME).write_text(other)
    check = checks.digests_agree(ledger.versions(run="demo"), storage, {})
    assert not check.ok
    assert "trl-policy-v2/manifest.json is not the manifest in the ledger" in check.detail


def test_replay_equals_tables_notices_a_changed_row(ledger: Ledger, tmp_path: Path) -> None:
    run_sql(str(tmp_path / "ledger.db"), "UPDATE lines SET current = 2")
    check = checks.replay_equals_tables(ledger)
    assert not check.ok
    assert "lines" in check.detail


def test_no_orphaned_process_finds_what_inherited_the_mark() -> None:
    mark = uuid.uuid4().hex
    assert checks.no_orphaned_process(mark).ok
    with subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, fleet.MARK: mark},
    ) as stray:
        check = checks.no_orphaned_process(mark)
        stray.kill()
    assert not check.ok
    assert f"process {stray.pid} " in check.detail
