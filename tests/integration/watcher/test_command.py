"""`policyline sidecar` as a process: signals, exit codes, one line for each thing that is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policyline.engines.child import free_port
from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from tests.forking import commands
from tests.ledger_builders import publish

WITHIN_S = 30.0
POLICYLINE = (sys.executable, "-m", "policyline")


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """An upgraded ledger with an open run, and an empty storage."""
    (tmp_path / "storage").mkdir()
    upgrade_url(str(tmp_path / "ledger.db"))
    return tmp_path / "ledger.db"


def command(ledger_file: Path, url: str, *extra: str) -> list[str]:
    root = ledger_file.parent
    given = {
        "--vllm": url,
        "--storage": str(root / "storage"),
        "--ledger": str(ledger_file),
        "--replica": "r0",
        "--cache": str(root / "cache"),
        "--listen": "127.0.0.1:0",
    }
    given.update(zip(extra[::2], extra[1::2], strict=True))
    options = [part for pair in given.items() for part in pair]
    return [*POLICYLINE, "--log-format", "json", "sidecar", *options]


@pytest.fixture
def engine() -> Iterator[SimulatedChild]:
    with SimulatedChild() as child:
        child.wait_healthy(WITHIN_S)
        yield child


def events(process: subprocess.Popen[str]) -> Iterator[str]:
    """The events in the log, as they come."""
    assert process.stderr is not None
    for line in process.stderr:
        yield json.loads(line).get("event", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_first_and_ends_with_zero(
    ledger_file: Path, engine: SimulatedChild, number: signal.Signals
) -> None:
    with subprocess.Popen(
        command(ledger_file, engine.url), stderr=subprocess.PIPE, text=True
    ) as process:
        seen = events(process)
        assert "joined" in seen
        process.send_signal(number)
        assert "left" in seen

        assert process.wait(WITHIN_S) == 0
    with Ledger(str(ledger_file)) as ledger:
        (row,) = ledger.replicas("trl-policy")
    assert (row.state, row.reason) == ("left", "stopped")


def test_a_signal_ends_the_wait_for_an_engine(ledger_file: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with subprocess.Popen(command(ledger_file, url), stderr=subprocess.PIPE, text=True) as process:
        assert "waiting_for_engine" in events(process)
        begun = time.monotonic()
        process.terminate()

        assert process.wait(WITHIN_S) == 0
        assert time.monotonic() - begun < WITHIN_S / 2


Fails = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def fails() -> Iterator[Fails]:
    """Runs a command that ends by itself: its exit code, and what it says beside its log."""
    with commands(servers=1) as running:

        def run(ledger_file: Path, url: str, *extra: str) -> tuple[int, str]:
            done = running.run(*command(ledger_file, url, *extra)[len(POLICYLINE) :])
            lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
            return done.returncode, "\n".join(lines)

        yield run


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ServiceOptions(runtime_lora=False), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (ServiceOptions(enable_lora=False), "--enable-lora"),
        (ServiceOptions(api_key="secret"), "POLICYLINE_VLLM_API_KEY"),
        (ServiceOptions(engine=EngineOptions(max_loras=5)), "--max-loras 6"),
        (ServiceOptions(engine=EngineOptions(max_loras=5), dev_mode=False), "--max-loras 6"),
    ],
)
def test_an_engine_that_cannot_work_is_one_line_and_exit_1(
    fails: Fails, ledger_file: Path, options: ServiceOptions, text: str
) -> None:
    with Ledger(str(ledger_file)) as ledger:
        publish(ledger, ledger.open_run("run"))
    with SimulatedChild(options) as engine:
        engine.wait_healthy(WITHIN_S)
        code, reported = fails(ledger_file, engine.url)

    assert (code, reported.count("\n")) == (1, 0)
    assert text in reported


@pytest.mark.parametrize(
    ("extra", "code", "text"),
    [
        (("--ledger", "{root}/other.db"), 3, "policyline ledger upgrade"),
        (("--cache", "{root}/ledger.db"), 3, "--cache"),
        (("--vllm", "localhost:8000"), 2, "--vllm"),
        (("--vllm", "http://127.0.0.1:1/v1"), 2, "the server's is http://127.0.0.1:1"),
        (("--vllm", "http://me:pa55@127.0.0.1:1"), 2, "holds a user or password"),
        (("--vllm", "http://me:pa55@127.0.0.1:x"), 2, "it may hold a password"),
        (("--advertise", "http://me:pa55@there"), 2, "holds a user or password"),
        (("--advertise", "ftp://there"), 2, "not an http(s) URL"),
        (("--api-key", "one\ntwo"), 2, "an HTTP header cannot carry"),
        (("--poll-interval", "nan"), 2, "poll_interval_s nan is not a finite number"),
        (("--ttl", "inf"), 2, "ttl_s inf is not a finite number"),
        (("--listen", "9109"), 2, "--listen"),
        (("--replica", "a/b"), 2, "replica 'a/b'"),
        (("--storage", "s3x://bucket"), 2, "s3x"),
        (("--ttl", "1"), 2, "--ttl"),
        (("--storage", "{root}/missing"), 3, "missing"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(
    fails: Fails, ledger_file: Path, extra: tuple[str, str], code: int, text: str
) -> None:
    option, value = extra
    extra = (option, value.replace("{root}", str(ledger_file.parent)))

    found, reported = fails(ledger_file, "http://127.0.0.1:1", *extra)

    assert found == code, reported
    assert text in " ".join(reported.replace("│", " ").split())
    assert "pa55" not in reported
