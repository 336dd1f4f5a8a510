"""Servers as children: they start, they end, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from policyline.engines.child import ChildServer, EngineStartFailed
from policyline.engines.simulated.child import SimulatedChild
from tests.engines import group

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('deaf', flush=True)
time.sleep(600)
"""


def test_the_double_starts_and_stops() -> None:
    with SimulatedChild() as server:
        server.wait_healthy(20)
        members = group(server.pid)
        log = server.log_path
        assert log.read_text().strip() == str(server.port)

    assert len(members) == 2
    assert psutil.wait_procs(members, timeout=5)[1] == []
    assert not log.exists()


def test_the_double_is_light() -> None:
    with SimulatedChild() as server:
        server.wait_healthy(20)

        assert sum(process.memory_info().rss for process in group(server.pid)) < 60e6


def test_a_restart_keeps_the_port() -> None:
    with SimulatedChild() as server:
        server.wait_healthy(20)
        url = server.url
        server.restart()
        server.wait_healthy(20)

        assert server.url == url


def test_a_deaf_server_is_killed(tmp_path: Path) -> None:
    with ChildServer([sys.executable, "-c", DEAF], log_path=tmp_path / "log") as server:
        deadline = time.monotonic() + 20
        while "deaf" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
        members = group(server.pid)
        server.stop(timeout_s=0.2)

    assert psutil.wait_procs(members, timeout=5)[1] == []


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    script = "import sys; print('line ' * 3); sys.exit('no such model')"
    with (
        ChildServer([sys.executable, "-c", script], log_path=tmp_path / "log") as server,
        pytest.raises(EngineStartFailed, match="ended with status 1") as failed,
    ):
        server.wait_healthy(20)

    assert "no such model" in str(failed.value)


def test_a_slow_start_is_given_up(tmp_path: Path) -> None:
    script = "import time; time.sleep(600)"
    with (
        ChildServer([sys.executable, "-c", script], log_path=tmp_path / "log") as server,
        pytest.raises(EngineStartFailed, match=r"not healthy within 0\.1 s"),
    ):
        server.wait_healthy(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_its_launcher(number: signal.Signals) -> None:
    script = (
        "import time\n"
        "from policyline.engines.simulated.child import SimulatedChild\n"
        "with SimulatedChild() as server:\n"
        "    server.wait_healthy(20)\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        assert launcher.stdout is not None
        members = group(int(launcher.stdout.readline()))
        os.kill(launcher.pid, number)

    assert len(members) == 2
    assert psutil.wait_procs(members, timeout=5)[1] == []
