"""`policyline router` as a process: what it says when it cannot, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from policyline.engines.child import ChildServer, EngineStartFailed
from policyline.ledger.db.migrate import upgrade_url

COMMAND = [sys.executable, "-m", "policyline", "router"]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | variables,
    )


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    url = str(tmp_path / "ledger.db")
    upgrade_url(url)
    return url


def test_help_has_examples_and_every_option_a_variable() -> None:
    done = run("--help")

    assert done.returncode == 0
    assert "policyline router --ledger" in done.stdout
    for variable in ("POLICYLINE_ROUTER_LISTEN", "POLICYLINE_SPOOL", "POLICYLINE_READY_WAIT"):
        assert variable[:20] in done.stdout


def test_a_ledger_that_is_not_there(tmp_path: Path) -> None:
    done = run("--ledger", str(tmp_path / "none.db"), "--spool", str(tmp_path / "spool"))

    assert done.returncode == 3
    assert "none.db" in done.stderr
    assert "policyline ledger upgrade" in done.stderr


def test_an_address_that_is_taken(tmp_path: Path, ledger: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--ledger", ledger, "--spool", str(tmp_path / "spool"), "--listen", address)

    assert done.returncode == 1
    assert address in done.stderr
    assert "--listen" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--listen", "8080"), "HOST:PORT"),
        (("--ready-wait", "-1"), "ready-wait"),
        (("--alias", ""), "alias"),
        (("--storage", "/tmp", "--forward-pause"), "forward-pause"),
    ],
)
def test_bad_usage(ledger: str, tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    done = run("--ledger", ledger, "--spool", str(tmp_path / "spool"), *arguments)

    assert done.returncode == 2
    assert part in done.stderr


def test_a_spool_that_cannot_be_written(ledger: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("--ledger", ledger, "--spool", str(tmp_path / "file"))

    assert done.returncode == 3
    assert "--spool" in done.stderr


def test_without_a_spool_it_uses_the_users_cache_directory(ledger: str, tmp_path: Path) -> None:
    """As the sidecar does. A file there shows which one is meant, and nothing is left behind."""
    cache = tmp_path / "cache"
    cache.write_text("")
    done = run("--ledger", ledger, "--listen", "127.0.0.1:8080", XDG_CACHE_HOME=str(cache))

    assert done.returncode == 3
    assert f"{cache}/policyline/spool-8080" in done.stderr


def test_it_starts_without_replicas_and_ends_with_0(ledger: str, tmp_path: Path) -> None:
    command = [*COMMAND, "--ledger", ledger, "--spool", str(tmp_path / "spool")]
    command += ["--listen", "127.0.0.1:{port}"]
    with ChildServer(command, log_path=tmp_path / "log") as child:
        with pytest.raises(EngineStartFailed):
            child.wait_healthy(3)
        connection = http.client.HTTPConnection("127.0.0.1", child.port, timeout=10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        assert (answer.status, content["problems"]) == (503, ["nothing is current"])
        assert child.terminate(20) == 0
