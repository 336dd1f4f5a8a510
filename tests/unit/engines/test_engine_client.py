"""The watcher's client: what it reads, what it keeps to itself, how it gives up."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from policyline.engines.child import free_port
from policyline.engines.simulated.faults import Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.answers import (
    read_busy,
    read_incarnation,
    read_json,
    read_max_loras,
    read_models,
    read_scores,
)
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import (
    EngineFault,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnreachable,
    NonFinite,
)
from tests.engines import PROMPT

SECRET = "sk-very-secret"


def series(names: str, value: str) -> str:
    labels = f'max_lora="6",running_lora_adapters="{names}",waiting_lora_adapters="{names}"'
    return f"vllm:lora_requests_info{{{labels}}} {value}\n"


def waiting(value: str) -> str:
    return f'vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {value}\n'


def test_the_newest_series_tells_who_is_busy() -> None:
    metrics = series("", "1.7e+09") + series("v1,v2", "1.9e+09") + series("v3", "1.8e+09")

    assert read_busy(metrics) == frozenset({"v1", "v2"})


def test_a_waiting_request_may_be_anyones() -> None:
    waiting = 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0\n'

    assert read_busy(series("v1", "1.0") + waiting) is None
    assert read_busy(series("v1", "1.0") + waiting.replace("1.0", "0.0")) == frozenset({"v1"})


def test_without_a_series_nothing_is_known() -> None:
    assert read_busy("# TYPE vllm:lora_requests_info gauge\n") is None


def test_escaped_names() -> None:
    assert read_busy(series(r"a \"b\" \\ c\nd", "1.0")) == frozenset({'a "b" \\ c\nd'})


@pytest.mark.parametrize("metrics", [series("v1", "1,5"), waiting("1,5"), waiting("x")])
def test_a_value_that_is_no_number_is_a_fault_of_the_engine(metrics: str) -> None:
    with pytest.raises(EngineFault, match="where a number is due"):
        read_busy(metrics)


def test_slots_that_cannot_be_are_not_known() -> None:
    for told in ("9" * 5000, "\u00b2", ""):
        assert read_max_loras(series("v1", "1.0").replace('"6"', f'"{told}"')) is None


def test_an_answer_nested_without_end_is_a_fault_of_the_engine() -> None:
    with pytest.raises(EngineFault):
        read_json("[" * 200_000)


def test_a_length_that_is_no_number_is_not_known() -> None:
    card = {"id": "tiny", "root": "/tiny", "parent": None, "max_model_len": "long"}
    assert read_models({"data": [card]}).base.max_model_len is None


def test_the_incarnation_is_the_text_itself() -> None:
    assert read_incarnation("x 1\nprocess_start_time_seconds 1.79595493738e+09\n") == (
        "1.79595493738e+09"
    )
    with pytest.raises(EngineFault):
        read_incarnation("# HELP process_start_time_seconds Start time\n")


@pytest.mark.parametrize("content", [None, [], {}, {"data": []}, {"data": [{"id": "a"}]}, "x"])
def test_a_registry_that_is_none(content: object) -> None:
    with pytest.raises(EngineFault):
        read_models(content)


def test_scores_that_are_none() -> None:
    def answer(*scores: float) -> object:
        entries = [None, *({"5": {"logprob": score}} for score in scores)]
        return {"choices": [{"prompt_logprobs": entries}]}

    assert read_scores(answer(-1.0, -2.0), 2) == (-1.0, -2.0)
    with pytest.raises(NonFinite):
        read_scores(answer(-1.0, float("nan")), 2)
    with pytest.raises(EngineFault, match="1 prompt log-probabilities where 2 were due"):
        read_scores(answer(-1.0), 2)
    with pytest.raises(EngineFault):
        read_scores({"choices": [{"prompt_logprobs": None}]}, 2)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "/v1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        EngineClient(url)


async def test_the_key_goes_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    options = ServiceOptions(api_key="another")
    async with (
        SimulatedServer(options) as server,
        EngineClient(server.url, api_key=SECRET) as client,
    ):
        with pytest.raises(EngineUnauthorized) as refused:
            await client.models()

    assert SECRET not in repr(client)
    assert SECRET not in repr(refused.value)
    assert SECRET not in str(vars(refused.value))
    assert SECRET not in caplog.text


Handler = Callable[[bytes], bytes]
Serve = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return a function that serves fixed answers on a port and returns the URL."""
    servers: list[asyncio.Server] = []

    async def start(answer: Handler) -> str:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", request)
            if length is not None:
                await reader.readexactly(int(length[1]))
            writer.write(answer(request))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


def answer(body: str, status: str = "200 OK", *more: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *more]
    return "\r\n".join([*head, "", body]).encode()


async def test_an_echoed_key_is_struck_out(serve: Serve) -> None:
    url = await serve(lambda request: answer(request.decode(), "500 Internal Server Error"))
    async with EngineClient(url, api_key=SECRET) as client:
        with pytest.raises(EngineFault) as fault:
            await client.models()

    assert SECRET not in fault.value.message


async def test_a_redirect_is_not_followed(serve: Serve) -> None:
    asked: list[bytes] = []

    def remember(request: bytes) -> bytes:
        asked.append(request)
        return answer("")

    elsewhere = await serve(remember)
    url = await serve(lambda _: answer("", "307 Temporary", f"Location: {elsewhere}/v1/models"))
    async with EngineClient(url, api_key=SECRET) as client:
        with pytest.raises(EngineFault, match="redirect"):
            await client.models()

    assert asked == []


async def test_another_model_does_not_pass(serve: Serve) -> None:
    url = await serve(lambda _: answer('{"model":"tiny","choices":[]}'))
    async with EngineClient(url) as client:
        with pytest.raises(EngineFault, match="'v1' was answered by another model"):
            await client.score("v1", PROMPT)


@pytest.mark.parametrize("body", ["", "<html>", "[1", "NaN", '"text"', "{}"])
async def test_an_unreadable_answer(serve: Serve, body: str) -> None:
    url = await serve(lambda _: answer(body))
    async with EngineClient(url) as client:
        for call in (client.models(), client.info(), client.score("v1", PROMPT)):
            with pytest.raises(EngineFault):
                await call
        with pytest.raises(EngineFault):
            await client.is_paused()


async def test_an_answer_cut_short(serve: Serve) -> None:
    url = await serve(lambda _: answer("x" * 100)[:-50])
    async with EngineClient(url) as client:
        with pytest.raises(EngineUnreachable):
            await client.models()


async def test_nobody_listens() -> None:
    async with EngineClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(EngineUnreachable):
            await client.snapshot()
        with pytest.raises(EngineUnreachable, match="cannot connect"):
            await client.wait_closed()


async def test_nobody_answers() -> None:
    left = asyncio.Event()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with EngineClient(url, timeouts=EngineTimeouts(observe_s=0.05)) as client:
        with pytest.raises(EngineTimeout):
            await client.incarnation()
    await left.wait()
    server.close()


async def test_a_url_with_a_path(serve: Serve) -> None:
    asked: list[bytes] = []

    def remember(request: bytes) -> bytes:
        asked.append(request.split(b"\r\n", maxsplit=1)[0])
        return answer("process_start_time_seconds 1.5\n")

    async with EngineClient(await serve(remember) + "/replica-0/") as client:
        assert await client.incarnation() == "1.5"

    (line,) = asked
    assert line.startswith(b"GET /replica-0/metrics/?name%5B%5D=process_start_time_seconds&")


async def test_waiting_ends_when_the_engine_closes(double: SimulatedServer) -> None:
    async with EngineClient(double.url) as client:
        closed = asyncio.create_task(client.wait_closed())
        for _ in range(20):
            await client.incarnation()
        assert not closed.done()
        await double.kill()
        await asyncio.wait_for(closed, 5)


async def test_an_observation_takes_two_requests(double: SimulatedServer) -> None:
    async with EngineClient(double.url) as client:
        await client.snapshot()

    assert double.requests == {"/metrics": 1, "/v1/models": 1}


async def test_a_server_that_does_not_select_is_asked_for_all_metrics_from_then_on(
    double: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policyline.watcher.vllm.client._SOME_METRICS", "/no_such_route")
    async with EngineClient(double.url) as client:
        for _ in range(3):
            await client.incarnation()

    assert double.requests == {"/no_such_route": 1, "/metrics": 3}


async def test_all_metrics_are_asked_for_while_only_some_cannot_be_had(
    double: SimulatedServer,
) -> None:
    """As behind a proxy that has no way to the route with a slash; it may have one later."""
    double.script(Fault("metrics", "fail", times=1, status=502, message="no upstream"))
    async with EngineClient(double.url) as client:
        await client.incarnation()
        assert double.requests == {"/metrics": 2}
        await client.incarnation()
        assert double.requests == {"/metrics": 3}


async def test_a_server_without_any_metrics_is_at_fault(double: SimulatedServer) -> None:
    double.script(Fault("metrics", "fail", times=2, status=502, message="no upstream"))
    async with EngineClient(double.url) as client:
        with pytest.raises(EngineFault, match="no upstream"):
            await client.incarnation()
