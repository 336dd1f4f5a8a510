"""What all tests share: adapters, a base model, servers; and what happens without the engine."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from policyline.demo.synthetic import write_adapter
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.vllm import VllmOptions, VllmServer, vllm_available
from tests.lanes import Lanes, longest_first

VLLM = VllmOptions(max_model_len=512)
"""Of the servers that tests share."""

ENGINE_TIMEOUT_S = 300
"""For a test on the real engine, its start included: 30 s alone, several times that when busy."""

# a busy machine is no finding: 0.3 s instead of 0.02 s was seen; and CI shows the same each time
hypothesis.settings.register_profile(
    "policyline", deadline=None, derandomize=bool(os.environ.get("CI"))
)
hypothesis.settings.load_profile("policyline")


# Two threads that wait for each other by spinning starve once other tests use the second core: a
# training step then takes seconds. The models here are too small to gain anything from a second.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Let SIGINT through to what tests start: a shell has its background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests on the real engine time; without it they say so, and under CI that fails."""
    needy = [item for item in items if item.get_closest_marker("engine")]
    for item in needy:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)
    missing = vllm_available()
    if missing is None or not needy:
        return
    if os.environ.get("CI"):
        raise pytest.UsageError(f"{len(needy)} tests need the real engine: {missing}")
    for item in needy:
        item.add_marker(pytest.mark.skip(reason=missing))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    """Let tests on the real vLLM stay with one worker."""
    return Lanes(config, log)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Twelve clearly different rank-1 adapters that fit the tiny base model."""
    root = tmp_path_factory.mktemp("adapters")
    return tuple(write_adapter(root / f"adapter-{seed}", seed) for seed in range(1, 13))


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base model; it takes torch, which comes with the real engine: mark the test so."""
    directory = tmp_path_factory.mktemp("base") / "tiny"
    command = [sys.executable, "-m", "policyline.demo.tiny_model", "base", str(directory)]
    subprocess.run(command, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="session")
def vllm_pair(tiny_base: Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    """The real servers that tests share, not started: `vllm_server`, `vllm_servers`."""
    first, second = (VllmServer(tiny_base, VLLM) for _ in range(2))
    yield first, second
    first.stop()
    second.stop()


@pytest.fixture
def vllm_server(vllm_pair: tuple[VllmServer, VllmServer]) -> Iterator[VllmServer]:
    """A real server without adapters; a test may also kill it."""
    (server,) = healthy(vllm_pair[:1])
    yield server
    unload_all(server)


@pytest.fixture
def vllm_servers(vllm_pair: tuple[VllmServer, VllmServer]) -> Iterator[list[VllmServer]]:
    """Two of them."""
    servers = healthy(vllm_pair)
    yield servers
    for server in servers:
        unload_all(server)


def healthy(servers: Iterable[VllmServer]) -> list[VllmServer]:
    """Start those that do not run, side by side."""
    found = list(servers)
    for server in found:
        if not _runs(server):
            server.restart()
    for server in found:
        server.wait_healthy(ENGINE_TIMEOUT_S)
    return found


def unload_all(server: VllmServer) -> None:
    """Leave a server that runs without adapters."""
    if not _runs(server):
        return
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as raw:
        for model in raw.get("/v1/models").json()["data"]:
            if model["parent"]:
                unload = {"lora_name": model["id"]}
                raw.post("/v1/unload_lora_adapter", json=unload).raise_for_status()


def _runs(server: VllmServer) -> bool:
    return server._process is not None and server.exit_status is None


@pytest.fixture
async def double() -> AsyncIterator[SimulatedServer]:
    """A double in this test's event loop."""
    async with SimulatedServer() as server:
        yield server
