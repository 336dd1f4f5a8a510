"""The double under load: what many calls at once do to it."""

import asyncio
import shutil
from pathlib import Path

import pytest

from policyline.demo.synthetic import write_adapter
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterAlreadyLoaded, EngineDead
from tests.engines import LONG, PROMPT, until

OPTIONS = ServiceOptions(EngineOptions(max_loras=2, max_model_len=512), step_delay_s=0.002)


async def test_a_burst_of_loads_kills_a_running_adapter_without_files(tmp_path: Path) -> None:
    async with SimulatedServer(OPTIONS) as server, EngineClient(server.url) as client:
        path = write_adapter(tmp_path / "running", 1)
        await client.load("running", str(path))
        running = asyncio.create_task(client.complete("running", PROMPT, **LONG))

        async def busy() -> bool:
            return "running" in ((await client.snapshot()).busy or set())

        await until(busy)
        shutil.rmtree(path)
        others = [str(write_adapter(tmp_path / str(seed), seed)) for seed in range(5)]

        await asyncio.gather(*(client.load(other, other) for other in others))

        with pytest.raises(EngineDead):
            await running


async def test_loads_one_at_a_time_spare_a_running_adapter(tmp_path: Path) -> None:
    async with SimulatedServer(OPTIONS) as server, EngineClient(server.url) as client:
        path = write_adapter(tmp_path / "running", 1)
        await client.load("running", str(path))
        running = asyncio.create_task(client.complete("running", PROMPT, **LONG))
        shutil.rmtree(path)

        for seed in range(5):
            await client.load(f"v{seed}", str(write_adapter(tmp_path / str(seed), seed)))
            # One step of the engine lies between two loads.
            await client.score("tiny", PROMPT)

        assert len((await running).token_ids) == LONG["max_tokens"]


async def test_a_load_stops_the_decoding(tmp_path: Path) -> None:
    options = ServiceOptions(EngineOptions(max_model_len=512), load_delay_s=0.3, step_delay_s=0.05)
    async with SimulatedServer(options) as server, EngineClient(server.url) as client:
        loading = asyncio.create_task(client.load("v1", str(write_adapter(tmp_path / "v1", 1))))
        await until(lambda: _asked(server, "/v1/load_lora_adapter"))
        scoring = asyncio.create_task(client.score("tiny", PROMPT))

        done, _ = await asyncio.wait({loading, scoring}, return_when=asyncio.FIRST_COMPLETED)

        assert scoring not in done
        await asyncio.gather(loading, scoring)


async def _asked(server: SimulatedServer, path: str) -> bool:
    return server.requests[path] > 0


async def test_many_clients_of_one_name(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "v1", 1))
    async with SimulatedServer() as server, EngineClient(server.url) as client:
        loads = (client.load("v1", path) for _ in range(20))

        results = await asyncio.gather(*loads, return_exceptions=True)

        assert sum(result is None for result in results) == 1
        assert sum(isinstance(result, AdapterAlreadyLoaded) for result in results) == 19
        assert await client.resident_ids() == {1}
