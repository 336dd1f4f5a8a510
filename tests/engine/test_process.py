"""The real server as a process: its death, its restart, and that nothing of it stays behind."""

import asyncio
from pathlib import Path

import psutil
import pytest

from policyline.engines.child import EngineStartFailed
from policyline.engines.vllm import VllmServer
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineUnreachable
from tests.conftest import ENGINE_TIMEOUT_S
from tests.engines import PROMPT, group, until

pytestmark = pytest.mark.engine


async def test_death_and_restart(vllm_server: VllmServer, adapters: tuple[Path, ...]) -> None:
    server = vllm_server
    async with EngineClient(server.url) as client:
        await client.load("forgotten", str(adapters[0]))
        before = await client.snapshot()
        scores = await client.score("forgotten", PROMPT)
        closed = asyncio.create_task(client.wait_closed())
        await client.incarnation()

        (worker,) = [p for p in group(server.pid) if "Worker" in " ".join(p.cmdline())]
        worker.kill()
        await asyncio.wait_for(closed, 30)

        async def ended() -> bool:
            return server.exit_status is not None

        await until(ended, 60)
        # So a restart policy of "on-failure" does not restart it.
        assert server.exit_status == 0
        with pytest.raises(EngineUnreachable):
            await client.snapshot()

        server.restart()
        await asyncio.to_thread(server.wait_healthy, ENGINE_TIMEOUT_S)
        after = await client.snapshot()
        assert float(after.incarnation) > float(before.incarnation)
        assert after.models.adapters == ()
        assert await client.resident_ids() == frozenset()
        await client.load("forgotten", str(adapters[0]))
        assert await client.score("forgotten", PROMPT) == scores
        await client.unload("forgotten")


async def test_nothing_stays_behind(vllm_server: VllmServer) -> None:
    members = group(vllm_server.pid)
    assert len(members) >= 4

    await asyncio.to_thread(vllm_server.stop)

    _, alive = psutil.wait_procs(members, timeout=10)
    assert alive == []


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    with VllmServer(tmp_path / "no-model", log_path=tmp_path / "log") as server:
        with pytest.raises(EngineStartFailed, match="the server ended with status 1") as failed:
            server.wait_healthy(ENGINE_TIMEOUT_S)
        assert "no-model" in str(failed.value)
        assert failed.value.log_path == tmp_path / "log"
    assert (tmp_path / "log").exists()
