"""`policyline demo` on the double, as a user runs it."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from policyline.demo import checks
from policyline.ledger import Ledger
from tests.acceptance.conftest import Command

CHECKS = [
    "window_served",
    "answers_differ",
    "out_of_window_evicted",
    "no_request_failed",
    "digests_agree",
    "replay_equals_tables",
    "no_orphaned_process",
]


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Wait for the end; return what was printed as JSON, and stderr."""
    out, err = process.communicate(timeout=120)
    assert out, err
    found: dict[str, Any] = json.loads(out)
    return found, err


def read_until(process: subprocess.Popen[str], wanted: str) -> None:
    """Read stderr up to the line that has `wanted` in it."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if wanted in line:
            return
    pytest.fail(f"{wanted!r} never appeared:\n{''.join(seen)}")


@pytest.mark.timeout(120)
def test_the_demo_holds_every_invariant_and_leaves_nothing(command: Command) -> None:
    begun = time.monotonic()
    process = command.start("demo", "--engine", "sim", "--json")
    found, err = finish(process)
    elapsed_s = time.monotonic() - begun

    assert process.returncode == 0, err
    assert [check["name"] for check in found["checks"]] == CHECKS
    assert all(check["ok"] for check in found["checks"])
    assert found["requests"]["failed"] == 0
    assert found["requests"]["sent"] > 0
    assert command.left() == []
    assert list(command.tmp.iterdir()) == []
    assert elapsed_s < 20


@pytest.mark.timeout(120)
def test_the_table_tells_what_each_replica_did_with_each_version(command: Command) -> None:
    found, err = finish(command.start("demo", "--engine", "sim", "--versions", "8", "--json"))
    lines = found["versions"]
    assert [line["version"] for line in lines] == list(range(1, 9)), err
    assert [line["role"] for line in lines] == ["out_of_window"] * 3 + ["window"] * 4 + ["current"]
    for line in lines:
        for cell in line["replicas"].values():
            if cell["state"] == "acked":
                assert line["role"] != "out_of_window"
                assert cell["acked_at"] >= line["published_at"]
                assert cell["publish_to_ack_s"] > 0
            elif cell["state"] == "evicted":
                assert line["role"] == "out_of_window"
                assert cell["evicted_at"] >= cell["acked_at"]
    assert found["publish_to_ack"]["p95_s"] >= found["publish_to_ack"]["p50_s"] > 0
    phases = list(found["phases"])
    assert phases.index("publisher.commit") < phases.index("watcher.load")
    assert {
        "publisher.save",
        "watcher.fetch",
        "watcher.verify",
        "watcher.probe",
    } <= set(phases)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_in_the_middle_leaves_nothing(
    command: Command, number: signal.Signals
) -> None:
    process = command.start("demo", "--engine", "sim", "--versions", "500")
    read_until(process, "published trl-policy-v3")
    assert len(command.left()) > 4
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert command.left() == []
    assert list(command.tmp.iterdir()) == []


@pytest.mark.timeout(120)
def test_an_interrupt_while_the_fleet_starts_leaves_nothing(command: Command) -> None:
    process = command.start("demo", "--engine", "sim")
    read_until(process, "engines")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert command.left() == []


@pytest.mark.timeout(120)
def test_even_a_killed_demo_leaves_no_process(command: Command) -> None:
    process = command.start("demo", "--engine", "sim", "--versions", "500")
    read_until(process, "published trl-policy-v3")
    orphans = command.left()
    process.kill()
    process.communicate(timeout=60)
    psutil.wait_procs(orphans, timeout=30)
    assert command.left() == []


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def _remove_manifest(path: Path) -> None:
    path.with_name("manifest.json").unlink()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sabotage", [_flip_last_byte, _remove_manifest])
def test_a_damaged_version_is_named_and_fails_the_demo(
    command: Command, tmp_path: Path, sabotage: Callable[[Path], None]
) -> None:
    workdir = tmp_path / "work"
    process = command.start("demo", "--engine", "sim", "--workdir", workdir, "--json")
    read_until(process, "published trl-policy-v8")
    # v1 has left the window, so that nobody but the final check looks at its bytes again.
    sabotage(workdir / "storage" / "trl-policy-v1" / "adapter_model.safetensors")
    found, err = finish(process)

    assert process.returncode == 1, err
    missed = [check for check in found["checks"] if not check["ok"]]
    assert [check["name"] for check in missed] == ["digests_agree"]
    assert "storage/trl-policy-v1/" in missed[0]["detail"]
    assert "MISSED digests_agree" in err
    assert workdir.is_dir()
    assert command.left() == []


@pytest.mark.timeout(120)
def test_a_kept_work_directory_can_be_checked_again(command: Command, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    process = command.start(
        "demo", "--engine", "sim", "--versions", "3", "--workdir", workdir, "--keep", "--json"
    )
    found, _ = finish(process)
    assert found["workdir"] == str(workdir)
    with Ledger(str(workdir / "ledger.db")) as ledger:
        rows = ledger.versions(run="demo")
        assert checks.digests_agree(rows, workdir / "storage", {}).ok
        assert checks.replay_equals_tables(ledger).ok
        _flip_last_byte(workdir / "storage" / "trl-policy-v2" / "adapter_config.json")
        again = checks.digests_agree(rows, workdir / "storage", {})
    assert not again.ok
    assert "trl-policy-v2/adapter_config.json" in again.detail


def test_a_work_directory_with_something_in_it_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    process = command.start("demo", "--engine", "sim", "--workdir", tmp_path)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "is not empty" in " ".join(err.replace("│", " ").split())
    assert (tmp_path / "mine").read_text() == "precious"
