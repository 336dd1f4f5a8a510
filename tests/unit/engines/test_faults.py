"""Scripted faults of the double, as the watcher's client meets them."""

import asyncio
import subprocess
from pathlib import Path

import httpx
import pytest

from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.faults import ALWAYS, Fault, take
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import (
    EngineDead,
    EngineError,
    EngineFault,
    EngineTimeout,
    EngineUnreachable,
    NonFinite,
)
from tests.engines import PROMPT, until

Adapters = tuple[Path, ...]
HASTY = EngineTimeouts(load_s=0.1, control_s=0.1, observe_s=0.1, score_s=0.1)


def test_faults_are_used_up_in_order() -> None:
    faults = [Fault("load", "fail", times=2), Fault("*", "hang", times=ALWAYS)]

    taken = [take(faults, call) for call in ("load", "models", "load", "load")]

    assert [fault.kind for fault in taken if fault] == ["fail", "hang", "fail", "hang"]


async def test_fail_twice_then_work(double: SimulatedServer, adapters: Adapters) -> None:
    double.script(Fault("load", "fail", times=2, status=500, message="out of luck"))
    async with EngineClient(double.url) as client:
        for _ in range(2):
            with pytest.raises(EngineFault, match="out of luck"):
                await client.load("v1", str(adapters[0]))
        await client.load("v1", str(adapters[0]))


async def test_a_lost_reply_took_effect(double: SimulatedServer, adapters: Adapters) -> None:
    double.script(Fault("load", "lose_reply"))
    async with EngineClient(double.url) as client:
        with pytest.raises(EngineUnreachable):
            await client.load("v1", str(adapters[0]))
        assert [adapter.name for adapter in (await client.models()).adapters] == ["v1"]


async def test_a_hanging_call(double: SimulatedServer, adapters: Adapters) -> None:
    double.script(Fault("load", "hang"))
    async with EngineClient(double.url, timeouts=HASTY) as client:
        with pytest.raises(EngineTimeout, match=r"within 0\.1 s"):
            await client.load("v1", str(adapters[0]))
        assert (await client.models()).adapters == ()


async def test_a_slow_load_lands_after_the_timeout(adapters: Adapters) -> None:
    async with (
        SimulatedServer(ServiceOptions(load_delay_s=0.3)) as server,
        EngineClient(server.url, timeouts=HASTY) as client,
    ):
        with pytest.raises(EngineTimeout):
            await client.load("v1", str(adapters[0]))

        async def landed() -> bool:
            return bool((await client.models()).adapters)

        await until(landed)


async def test_a_stale_list(double: SimulatedServer, adapters: Adapters) -> None:
    async with EngineClient(double.url) as client:
        double.script(Fault("models", "stale"))
        await client.load("v1", str(adapters[0]))
        assert (await client.models()).adapters == ()
        assert len((await client.models()).adapters) == 1


async def test_nan_and_another_model(double: SimulatedServer, adapters: Adapters) -> None:
    async with EngineClient(double.url) as client:
        await client.load("v1", str(adapters[0]))
        right, base = await client.score("v1", PROMPT), await client.score("tiny", PROMPT)
        double.script(Fault("completions", "nan"))
        double.script(Fault("completions", "as_base"))

        with pytest.raises(NonFinite):
            await client.score("v1", PROMPT)
        assert await client.score("v1", PROMPT) == base
        assert await client.score("v1", PROMPT) == right


async def test_restart_and_forget(double: SimulatedServer, adapters: Adapters) -> None:
    async with EngineClient(double.url) as client:
        await client.load("v1", str(adapters[0]))
        before = await client.snapshot()
        closed = asyncio.create_task(client.wait_closed())
        await client.incarnation()

        async with httpx.AsyncClient(base_url=double.url) as raw:
            assert (await raw.post("/_faults", json={"kind": "restart"})).status_code == 200
        await asyncio.wait_for(closed, 5)

        after = await client.snapshot()
        assert after.models.adapters == ()
        assert float(after.incarnation) > float(before.incarnation)


async def test_death(double: SimulatedServer, adapters: Adapters) -> None:
    double.script(Fault("completions", "die"))
    async with EngineClient(double.url, timeouts=HASTY) as client:
        with pytest.raises(EngineDead):
            await client.score("tiny", PROMPT)
        await double.closed.wait()
        with pytest.raises(EngineUnreachable):
            await client.incarnation()

        await double.restart()
        assert len(await client.score("tiny", PROMPT)) == len(PROMPT) - 1


async def test_a_load_in_flight_at_death_is_never_answered(adapters: Adapters) -> None:
    """And it keeps the process alive, deaf to SIGTERM, as in vLLM."""
    with SimulatedChild(ServiceOptions(load_delay_s=0.2)) as server:
        server.wait_healthy(20)
        async with (
            EngineClient(server.url, timeouts=EngineTimeouts(load_s=1)) as client,
            httpx.AsyncClient(base_url=server.url) as raw,
        ):
            await raw.post("/_faults", json={"call": "completions", "kind": "die"})
            loading = asyncio.create_task(client.load("v1", str(adapters[0])))
            with pytest.raises(EngineDead):
                await client.score("tiny", PROMPT)
            with pytest.raises(EngineTimeout):
                await loading
            with pytest.raises(EngineError):
                await client.incarnation()
        with pytest.raises(subprocess.TimeoutExpired):
            server.terminate(0.5)
        server.kill()


async def test_death_ends_the_process_with_status_0() -> None:
    with SimulatedChild() as server:
        server.wait_healthy(20)
        async with httpx.AsyncClient(base_url=server.url) as raw:
            await raw.post("/_faults", json={"call": "version", "kind": "die"})
            await raw.get("/version")

        async def ended() -> bool:
            return server.exit_status is not None

        await until(ended)
        assert server.exit_status == 0
