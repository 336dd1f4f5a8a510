"""The same servers twice: as doubles and as real vLLM. Where they differ the double is wrong."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from policyline.engines.child import ChildServer
from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions
from policyline.engines.vllm import VllmOptions, VllmServer
from policyline.watcher.vllm.client import EngineClient
from tests.conftest import ENGINE_TIMEOUT_S, healthy
from tests.engines import PATIENT

KEY = "the-key"

_VLLM = {  # "main" is the server that all tests share
    "small": VllmOptions(max_model_len=4096, max_loras=2, max_cpu_loras=2),
    "gated": VllmOptions(api_key=KEY, runtime_lora=False, dev_mode=False),
}
_ENGINE = EngineOptions(max_model_len=512)
_FITTING = ServiceOptions(_ENGINE, hidden_size=128, layers=2, step_delay_s=0.002)
_DOUBLE = {
    "main": _FITTING,
    "small": replace(_FITTING, engine=replace(_ENGINE, max_loras=2, max_model_len=4096)),
    "gated": replace(_FITTING, api_key=KEY, runtime_lora=False, dev_mode=False),
}

Launch = Callable[[str], ChildServer]


@pytest.fixture(
    scope="package",
    params=["double", pytest.param("vllm", marks=pytest.mark.engine)],
)
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Return a function that starts a server and waits for it."""
    with contextlib.ExitStack() as servers:

        def start(name: str) -> ChildServer:
            if request.param == "double":
                server: ChildServer = SimulatedChild(_DOUBLE[name])
            elif name == "main":
                pair: tuple[VllmServer, VllmServer] = request.getfixturevalue("vllm_pair")
                return healthy(pair[:1])[0]
            else:
                server = VllmServer(request.getfixturevalue("tiny_base"), _VLLM[name])
            servers.enter_context(server).wait_healthy(ENGINE_TIMEOUT_S)
            return server

        yield start


@pytest.fixture(scope="package")
def main(launch: Launch) -> ChildServer:
    """A server with `max_loras` 6, the development routes and no key."""
    return launch("main")


@pytest.fixture(scope="package")
def gated(launch: Launch) -> ChildServer:
    """A server with a key, without the development routes and without runtime LoRA."""
    return launch("gated")


@pytest.fixture(scope="package")
def small(launch: Launch) -> ChildServer:
    """A server with two slots, whose engine the tests may kill."""
    return launch("small")


@pytest.fixture
async def client(main: ChildServer) -> AsyncIterator[EngineClient]:
    """A client of `main`; the registry is empty again after the test."""
    async with EngineClient(main.url, timeouts=PATIENT) as client:
        yield client
        for adapter in (await client.models()).adapters:
            await client.unload(adapter.name)


@pytest.fixture
async def raw(main: ChildServer) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of `main`, for statuses and bodies."""
    async with httpx.AsyncClient(base_url=main.url, timeout=60, trust_env=False) as raw:
        yield raw
