"""`policyline doctor` as a process: lines, JSON, exit codes, the launch line, Ctrl-C."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policyline.demo.synthetic import write_adapter
from policyline.engines.child import free_port
from policyline.engines.simulated.child import SimulatedChild
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.db.migrate import upgrade_url
from tests.forking import Done, commands

WITHIN_S = 30.0
DOCTOR = [sys.executable, "-m", "policyline", "doctor"]


Doctor = Callable[..., Done]


@pytest.fixture(scope="module")
def doctor() -> Iterator[Doctor]:
    """Runs the command to its end."""
    with commands(servers=1) as running:
        yield lambda *arguments: running.run("doctor", *map(str, arguments))


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedChild]:
    with SimulatedChild() as child:
        child.wait_healthy(WITHIN_S)
        yield child


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """An upgraded ledger with an open run of a small window."""
    upgrade_url(str(tmp_path / "ledger.db"))
    with Ledger(str(tmp_path / "ledger.db")) as ledger:
        ledger.open_run("grpo-7", settings=RunSettings(max_staleness=2))
    return tmp_path / "ledger.db"


def test_everything_at_once(doctor: Doctor, engine: SimulatedChild, ledger_file: Path) -> None:
    root = ledger_file.parent
    for name in ("storage", "cache"):
        (root / name).mkdir()
    write_adapter(root / "adapter", 1)

    given = ["--vllm", engine.url, "--ledger", ledger_file, "--storage", root / "storage"]
    done = doctor(*given, "--cache", root / "cache", "--adapter", root / "adapter")

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    noted = {line.split()[1] for line in lines if line.split()[0] == "note"}
    assert noted <= {"engine.nameless", "storage.file_events"}
    assert {line.split()[0] for line in lines} == {"pass", "note"}
    (slots,) = (line for line in lines if "engine.max_loras" in line)
    assert slots.split(maxsplit=2)[2] == "6; max_staleness 2 (run 'grpo-7') needs 4"
    for area in ("engine.", "ledger.", "storage.", "adapter."):
        assert any(area in line for line in lines)
    assert "\x1b" not in done.stdout
    assert sorted(p.name for p in (root / "storage").iterdir()) == []


def test_json_holds_the_same(doctor: Doctor, engine: SimulatedChild) -> None:
    done = doctor("--vllm", engine.url, "--max-staleness", 9, "--json")

    content = json.loads(done.stdout)
    assert (done.returncode, content["exit_code"]) == (1, 1)
    failed = [check for check in content["checks"] if check["status"] == "fail"]
    assert [check["name"] for check in failed] == ["engine.max_loras"]
    assert failed[0]["remedy"] == "start vLLM with --max-loras 11 or more"


def test_nobody_there_is_exit_3(doctor: Doctor, tmp_path: Path) -> None:
    for option, value in (
        ("--vllm", f"http://127.0.0.1:{free_port()}"),
        ("--ledger", tmp_path / "none.db"),
        ("--storage", tmp_path / "nowhere"),
    ):
        done = doctor(option, value)

        assert (done.returncode, done.stderr) == (3, "")
        assert done.stdout.startswith("fail  ")
        assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "at least one of"),
        (("--vllm", "localhost:8000"), "--vllm"),
        (("--storage", "s", "--line", "A/B"), "line 'A/B'"),
        (("--adapter", "a", "--sidecar-storage", "s"), "--storage"),
        (("--adapter", "a", "--cache", "c"), "--vllm"),
        (("--adapter", "a", "--max-staleness", "-1"), "--max-staleness"),
    ],
)
def test_usage(doctor: Doctor, arguments: tuple[str, ...], text: str) -> None:
    done = doctor(*arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_an_adapter_alone(doctor: Doctor, tmp_path: Path) -> None:
    (write_adapter(tmp_path, 1) / "adapter_model.safetensors").rename(
        tmp_path / "adapter_model.bin"
    )

    done = doctor("--adapter", tmp_path)

    assert done.returncode == 1
    assert "adapter_model.bin: it is a pickle" in done.stdout


def test_the_launch_line_is_all_of_stdout_and_asks_no_server(
    doctor: Doctor, ledger_file: Path
) -> None:
    adapter = write_adapter(ledger_file.parent / "adapter", 1, rank=12)

    given = ["--ledger", ledger_file, "--adapter", adapter, "--base-model", "Qwen/Qwen3-8B"]
    done = doctor("--print-vllm-flags", *given, "--vllm", f"http://127.0.0.1:{free_port()}")

    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    words = shlex.split(done.stdout)
    assert words[:4] == ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "vllm", "serve", "Qwen/Qwen3-8B"]
    assert " ".join(words[4:]) == (
        "--enable-lora --max-loras 4 --max-cpu-loras 8 --max-lora-rank 16"
    )


@pytest.mark.parametrize(
    ("option", "place", "code"), [("--adapter", "no-adapter", 1), ("--ledger", "no.db", 3)]
)
def test_no_launch_line_is_made_from_what_cannot_be_read(
    doctor: Doctor, tmp_path: Path, option: str, place: str, code: int
) -> None:
    done = doctor("--print-vllm-flags", option, tmp_path / place)

    assert (done.returncode, done.stdout) == (code, "")
    assert f"{option}: " in done.stderr
    assert place in done.stderr


def test_an_interrupt_leaves_nothing_in_the_storage(tmp_path: Path) -> None:
    for name in ("storage", "other"):
        (tmp_path / name).mkdir()
    given = ["--storage", tmp_path / "storage", "--sidecar-storage", tmp_path / "other"]
    with subprocess.Popen([*DOCTOR, *map(str, given), "--timeout", "600"]) as process:
        while not list((tmp_path / "storage").iterdir()):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)

        assert process.wait(WITHIN_S) != 0
    assert list((tmp_path / "storage").iterdir()) == []
