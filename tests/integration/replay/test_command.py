"""`policyline ledger replay --into` as a process: output, exit codes, signals, kill and resume."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from policyline.engines.child import free_port
from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.service import ServiceOptions
from tests.integration.replay.stage import Stage, names

WITHIN_S = 30.0


@pytest.fixture
def engine() -> Iterator[SimulatedChild]:
    """A double that takes half a second for a load."""
    with SimulatedChild(ServiceOptions(load_delay_s=0.5)) as child:
        child.wait_healthy(WITHIN_S)
        yield child


def command(stage: Stage, url: str, *extra: str) -> list[str]:
    root = stage.root
    ledger, storage = str(root / "ledger.db"), str(root / "storage")
    start = [sys.executable, "-m", "policyline", "ledger", "replay", "run", "--ledger", ledger]
    return [*start, "--into", url, "--storage", storage, "--cache", str(root / "cache"), *extra]


def run(stage: Stage, url: str, *extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(stage, url, *extra), check=False, capture_output=True, text=True, timeout=WITHIN_S
    )


def listed(engine: SimulatedChild) -> list[str]:
    cards = httpx.get(f"{engine.url}/v1/models", trust_env=False).json()["data"]
    return [card["id"] for card in cards if card["parent"]]


def loads(engine: SimulatedChild) -> int:
    """Loads asked for; each start of a replay asks for one that has no name."""
    counts: dict[str, int] = httpx.get(f"{engine.url}/_requests", trust_env=False).json()
    return counts.get("/v1/load_lora_adapter", 0)


def test_one_object_for_each_version_and_exit_0(stage: Stage, engine: SimulatedChild) -> None:
    done = run(stage, engine.url, "--versions", "2..3", "--json")

    assert done.returncode == 0, done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(o["name"], o["outcome"], o["ok"]) for o in objects] == [
        (name, "agrees", True) for name in names(2, 3)
    ]
    assert "[2/2] trl-policy-v3 agrees, difference 0 from r0" in done.stderr


def test_a_table_and_exit_1_when_bytes_were_changed(stage: Stage, engine: SimulatedChild) -> None:
    stage.spoil(2)

    done = run(stage, engine.url, "--versions", "1..2")

    assert done.returncode == 1
    assert [line.split()[:1] for line in done.stdout.splitlines() if "trl-policy" in line] == [
        [name] for name in names(1, 2)
    ]
    assert "wrong: trl-policy-v2" in done.stderr
    assert listed(engine) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_loaded(
    stage: Stage, engine: SimulatedChild, number: signal.Signals
) -> None:
    with subprocess.Popen(
        command(stage, engine.url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "[1/5]" in process.stderr.readline()  # v2 is being loaded, or about to be
        process.send_signal(number)

        assert process.wait(WITHIN_S) == 128 + number
        assert "interrupted" in process.stderr.read()
    assert listed(engine) == []


def test_a_killed_replay_goes_on_and_unloads_what_it_had_loaded(
    stage: Stage, engine: SimulatedChild, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    with subprocess.Popen(
        command(stage, engine.url, "--state", str(state)), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while loads(engine) < 1 + 2:  # that of version 2 has begun
            assert process.poll() is None
        process.kill()
    assert json.loads(state.read_text())["loaded"]["name"] == names(2)[0]
    while listed(engine) != names(2):  # the load goes on without its client
        pass

    done = run(stage, engine.url, "--state", str(state), "--json")

    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["version"] for line in done.stdout.splitlines()] == [1, 2, 3, 4, 5]
    assert listed(engine) == []
    assert loads(engine) == 2 + 1 + 5  # v1 once, v2 twice


@pytest.mark.parametrize(
    ("extra", "code", "text"),
    [
        (("--versions", "7..2"), 2, "--versions"),
        (("--versions", "9.."), 2, "published: 1..5"),
        (("--speed", "2"), 2, "--versions, not"),
        (("--storage", "{root}/nowhere"), 3, "mkdir -p"),
        (("--cache", "{root}/ledger.db"), 3, "--cache"),
        (("--state", "{root}/no/state.json"), 2, "--state"),
    ],
)
def test_options_that_cannot_work(
    stage: Stage, engine: SimulatedChild, extra: tuple[str, str], code: int, text: str
) -> None:
    option, value = extra

    done = run(stage, engine.url, option, value.replace("{root}", str(stage.root)))

    assert done.returncode == code, done.stderr
    assert text in done.stderr


def test_no_server_is_exit_3(stage: Stage) -> None:
    done = run(stage, f"http://127.0.0.1:{free_port()}")

    assert done.returncode == 3
    assert "does not answer" in done.stderr
