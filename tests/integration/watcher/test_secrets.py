"""The engine's key and the ledger's password are shown to nobody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from policyline.engines.child import free_port
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineFault
from tests.integration.watcher.site import Site

KEY = "k3y-of-the-engine"
PASSWORD = "pa55word-of-the-ledger"


async def test_the_key_is_in_no_log_status_metric_or_event(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with (
        SimulatedServer(ServiceOptions(api_key=KEY)) as engine,
        site.sidecar(engine, api_key=KEY) as running,
    ):
        assert KEY not in repr(running.client)
        engine.script(Fault("load", "fail", times=ALWAYS, message=f"refused with Bearer {KEY}"))
        await site.publish(1)
        await running.until_status("refused with Bearer ***")
        shown = [(await running.get(p)).text for p in ("/status", "/metrics", "/readyz")]
        engine.clear_faults()
        engine.script(Fault("completions", "lose_reply"))
        await site.until_acked(1)
        engine.script(Fault("models", "fail", times=ALWAYS, message=KEY))
        await running.until_status('"unknown"')
        shown.append((await running.get("/status")).text)
        engine.clear_faults()
        await engine.restart()
        await site.until(lambda v: v.acked_by(1) == ("r0",))

    shown += [repr(event) for event in site.ledger.events()]
    shown += [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert any("***" in text for text in shown)
    assert not [text for text in shown if KEY in text]


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """An HTTP server that always answers the same; its port, and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], asked


async def test_the_key_goes_to_the_engine_alone() -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with answering(ok) as (elsewhere, told):
        redirect = (
            f"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:{elsewhere}/v1/models\r\n"
            "Content-Length: 0\r\nConnection: close\r\n\r\n"
        ).encode()
        async with (
            answering(redirect) as (port, asked),
            EngineClient(f"http://127.0.0.1:{port}", api_key=KEY) as client,
        ):
            with pytest.raises(EngineFault, match="redirect"):
                await client.models()

    assert f"Bearer {KEY}".encode() in asked[0]
    assert told == []


@pytest.mark.parametrize("flags", [(), ("-vv",)])
def test_neither_is_in_what_a_failing_command_says(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "storage").mkdir()
    url = f"postgresql://me:{PASSWORD}@127.0.0.1:{free_port()}/policies"
    command = [sys.executable, "-m", "policyline", *flags, "sidecar"]
    options = {
        "--vllm": f"http://127.0.0.1:{free_port()}",
        "--storage": str(tmp_path / "storage"),
        "--ledger": url,
        "--cache": str(tmp_path / "cache"),
        "--listen": "127.0.0.1:0",
        "--api-key": KEY,
    }
    done = subprocess.run(
        [*command, *(part for pair in options.items() for part in pair)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    reported = done.stdout + done.stderr
    assert done.returncode == 3, reported
    assert "127.0.0.1" in reported
    assert PASSWORD not in reported
    assert KEY not in reported
