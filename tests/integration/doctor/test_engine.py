"""A server measured: the double, which can misbehave, and once the real one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policyline.doctor.model import Line
from policyline.doctor.run import examine
from policyline.doctor.settings import Target
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.engines.vllm import VllmServer
from policyline.watcher.vllm.client import EngineClient
from tests.integration.watcher.conftest import site
from tests.integration.watcher.site import Site

__all__ = ["site"]


async def lines_of(url: str, **given: Any) -> dict[str, Line]:
    """What the doctor says, by name; known problems left out."""
    target = replace(Target(vllm=url, timeout_s=5.0), **given)
    report = await examine(target, lambda _text: None)
    return {line.name: line for line in report.lines if line.name != "engine.known_problem"}


def entries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def bad(lines: dict[str, Line]) -> dict[str, str]:
    """Name and status of those that did not pass, but for the note that every vLLM gets."""
    expected = {("engine.nameless", "note")}
    found = {(name, line.status) for name, line in lines.items() if line.status != "pass"}
    return dict(found - expected)


async def test_a_good_server_passes_and_is_left_as_it_was(
    double: SimulatedServer, tmp_path: Path
) -> None:
    lines = await lines_of(double.url, cache=tmp_path / "new" / "cache")

    assert bad(lines) == {}
    assert len(lines) == 16
    assert double.service.registry == {}
    assert double.service.engine.worker.resident_ids == ()
    assert entries(tmp_path) == []


async def test_nobody_there(double: SimulatedServer) -> None:
    await double.kill()

    lines = await lines_of(double.url)

    assert bad(lines) == {"engine.reachable": "fail"}
    assert lines["engine.reachable"].unreachable


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ServiceOptions(dev_mode=False),
            {
                "engine.dev_endpoints": "warn",
                "engine.max_cpu_loras": "warn",
                "engine.resolvers": "skip",
            },
        ),
        (
            ServiceOptions(EngineOptions(max_loras=5), dev_mode=False),
            {
                "engine.dev_endpoints": "warn",
                "engine.max_loras": "fail",
                "engine.max_cpu_loras": "warn",
                "engine.resolvers": "skip",
            },
        ),
        (ServiceOptions(runtime_lora=False), {"engine.runtime_lora": "fail"}),
        (
            ServiceOptions(enable_lora=False),
            {
                "engine.runtime_lora": "fail",
                "engine.max_loras": "warn",
                "engine.max_cpu_loras": "skip",
            },
        ),
        (
            ServiceOptions(enable_lora=False, dev_mode=False),
            {
                "engine.runtime_lora": "fail",
                "engine.dev_endpoints": "warn",
                "engine.max_loras": "warn",
                "engine.max_cpu_loras": "warn",
                "engine.resolvers": "skip",
            },
        ),
        (ServiceOptions(EngineOptions(max_loras=5)), {"engine.max_loras": "fail"}),
        (ServiceOptions(EngineOptions(max_model_len=16)), {"engine.base_model": "fail"}),
    ],
)
async def test_how_it_was_started(options: ServiceOptions, expected: dict[str, str]) -> None:
    async with SimulatedServer(options) as double:
        lines = await lines_of(double.url)

    found = bad(lines)
    assert expected.items() <= found.items()
    assert found.keys() - expected.keys() <= {"engine.answers", "engine.unknown_names"}


async def test_slots_are_read_from_the_metrics_where_nothing_else_tells(
    adapters: tuple[Path, ...],
) -> None:
    async with SimulatedServer(ServiceOptions(dev_mode=False)) as double:
        async with EngineClient(double.url) as client:
            await client.load("somebody-elses", str(adapters[0]))
            await client.score("somebody-elses", (1, 2, 3))

        lines = await lines_of(double.url, max_staleness=3)

    assert lines["engine.max_loras"].value.startswith("6; ")
    assert lines["engine.other_adapters"].value == "somebody-elses"


async def test_a_key(double: SimulatedServer) -> None:
    async with SimulatedServer(ServiceOptions(api_key="the-key")) as guarded:
        without = await lines_of(guarded.url)
        wrong = await lines_of(guarded.url, api_key="not-it")
        right = await lines_of(guarded.url, api_key="the-key")

    for lines in (without, wrong):
        assert lines["engine.models"].status == "fail"
        assert "VLLM_API_KEY" in lines["engine.models"].remedy
        assert not any("not-it" in f"{line.value}{line.remedy}" for line in lines.values())
    assert bad(right) == {}


async def test_a_pause_is_told_and_not_waited_for(double: SimulatedServer) -> None:
    async with EngineClient(double.url) as client:
        await client.pause("keep")

    lines = await lines_of(double.url)

    assert lines["engine.answers"].status == "fail"
    assert f"{double.url}/resume" in lines["engine.answers"].remedy


async def test_a_hung_worker_behind_a_live_server(double: SimulatedServer) -> None:
    double.script(Fault("completions", "hang", times=ALWAYS))

    lines = await lines_of(double.url, timeout_s=0.2)

    assert lines["engine.answers"].status == "fail"
    assert lines["engine.answers"].unreachable
    assert "restart vLLM" in lines["engine.answers"].remedy


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("metrics", "engine.incarnation"),
        ("models", "engine.models"),
        ("server_info", "engine.dev_endpoints"),
        ("is_paused", "engine.answers"),
    ],
)
async def test_one_missing_answer_hides_no_other(
    double: SimulatedServer, call: str, name: str
) -> None:
    double.script(Fault(call, "fail", times=ALWAYS, message="scripted"))

    lines = await lines_of(double.url)

    assert (lines[name].status, "scripted" in lines[name].value) == ("fail", True)
    assert lines["engine.runtime_lora"].status in {"pass", "warn"}
    assert lines["engine.version"].status == "pass"


async def test_adapters_of_a_former_run_are_refused_and_our_own_are_not(
    site: Site, double: SimulatedServer, adapters: tuple[Path, ...]
) -> None:
    ledger = str(site.root / "ledger.db")
    async with site.sidecar(double):
        await site.publish_and_wait(1)
        own = await lines_of(double.url, ledger=ledger)
        async with EngineClient(double.url) as client:
            await client.load("trl-policy-v9", str(adapters[0]))
        foreign = await lines_of(double.url, ledger=ledger)

    assert own["engine.adapters"].status == "pass"
    assert "1 of this ledger" in own["engine.adapters"].value
    assert foreign["engine.adapters"].status == "fail"
    assert str(adapters[0]) in foreign["engine.adapters"].value
    assert "trl-policy-v1" not in foreign["engine.adapters"].value


async def test_a_cache_that_the_engine_does_not_see(
    double: SimulatedServer, tmp_path: Path
) -> None:
    text = "Loading lora x failed: No adapter found for <path>"
    double.script(Fault("load", "fail", times=2, status=404, message=text))

    lines = await lines_of(double.url, cache=tmp_path)

    assert lines["engine.reads_cache"].status == "fail"
    assert "same path" in lines["engine.reads_cache"].remedy
    assert entries(tmp_path) == []


@contextlib.asynccontextmanager
async def balanced(*ports: int) -> AsyncIterator[str]:
    """One address that hands each connection to the next server."""
    turns = itertools.cycle(ports)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(1 << 16):
                writer.write(content)
                await writer.drain()
        writer.close()

    async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", next(turns))
        await asyncio.gather(pump(reader, to_server), pump(from_server, writer))

    server = await asyncio.start_server(hand_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_balancer_over_two_servers_is_found_out(double: SimulatedServer) -> None:
    async with SimulatedServer() as second, balanced(double.port, second.port) as url:
        lines = await lines_of(url)

    assert lines["engine.api_servers"].status == "fail"
    assert "2 different start times" in lines["engine.api_servers"].value


@pytest.mark.engine
async def test_the_real_server(
    vllm_server: VllmServer, tiny_base: Path, adapters: tuple[Path, ...], tmp_path: Path
) -> None:
    lines = await lines_of(
        vllm_server.url,
        timeout_s=120.0,
        cache=tmp_path,
        adapter=adapters[0],
        base_model=str(tiny_base),
        line="doctors-own",
    )

    assert bad(lines) == {}
    assert lines["engine.version"].value.startswith("0.32.0")
    assert lines["engine.max_loras"].value.startswith("6;")
    assert lines["engine.api_servers"].status == "pass"
    assert "answered by the base model" in lines["engine.nameless"].value
    assert entries(tmp_path) == []
    async with EngineClient(vllm_server.url) as client:
        names = [a.name for a in (await client.models()).adapters]
        assert not any(name.startswith("policyline-doctor") for name in names)
