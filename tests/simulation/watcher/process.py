"""A double's process and the way to it, without a socket: the double's own ASGI application.

As over TCP, a client that leaves does not stop the work it asked for, a process that is killed cuts
every connection, and nobody is answered by a process that listens no more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, MutableMapping
from typing import Any

import aiohttp
import httpx

from policyline.engines.simulated.app import Host, create_app
from policyline.engines.simulated.faults import Fault
from policyline.engines.simulated.service import Service, ServiceOptions
from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.connection import EngineAnswer, EngineRequest
from policyline.watcher.vllm.errors import EngineUnreachable
from tests.simulation.watcher.lifeline import Lifeline

ONE_WAY_S = 0.0013
"""Of a request and of its answer, on the injected clock."""
DEATH_TO_CLOSE_S = 0.02
TIMEOUTS = EngineTimeouts(
    connect_s=1.0,
    observe_s=2.0,
    load_s=4.0,
    unload_s=2.0,
    score_s=4.0,
    complete_s=30.0,
    control_s=3.0,
)
LONGEST_CALL_S = 4.0
"""Of the watcher's calls."""

Message = MutableMapping[str, Any]


class EngineProcess:
    """One vLLM server on one address, over all its lives.

    Args:
        options: how it is started.
        on_fault: is told of an error in the double itself.
    """

    def __init__(self, options: ServiceOptions, on_fault: Callable[[str], None]) -> None:
        self._options = options
        self._on_fault = on_fault
        self.done: Callable[[httpx.Request], None] = lambda _request: None
        """Told of a call once it is done, whether or not anybody still waits for the answer."""
        self._clients = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._host: Host | None = None
        self.faults: list[Fault] = []
        self.listens = False
        self.closed = asyncio.Event()
        self.lives = 0
        self.deaths = 0

    @property
    def service(self) -> Service | None:
        """The present life, unless it has ended."""
        if self._host is None or not self.listens or self._host.service.dead:
            return None
        return self._host.service

    @property
    def incarnation(self) -> str | None:
        """As its metrics print it; None while there is no living engine."""
        return None if self.service is None else repr(self.service.started_at)

    def busy(self) -> set[str]:
        """Names with a request anywhere in the living engine."""
        if self.service is None:
            return set()
        engine = self.service.engine
        return {r.adapter.name for r in (*engine.running, *engine.waiting) if r.adapter}

    def start(self) -> None:
        """Begin a life; only in the running loop."""
        self.lives += 1
        now = asyncio.get_running_loop().time
        service = Service(self._options, self._on_death, now)
        service.started_at += self.lives / 1000
        if self._host is None:
            self._host = Host(service, self.faults, self._drop, _never_restarts)
            self._app = create_app(self._host)
        self._host.service = service
        self.listens = True
        self.closed.clear()

    def script(self, fault: Fault) -> None:
        """Have it misbehave; only after the first start."""
        assert self._host is not None
        self._host.script(fault)

    async def kill(self) -> None:
        """Vanish as after SIGKILL."""
        if not self.listens or self._host is None:
            return
        self._stop_listening()
        self.deaths += 1
        for call in list(self._calls.values()):
            call.cut()
        for task in list(self._tasks):
            task.cancel()
        await self._host.service.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_death(self) -> None:
        """The engine died by itself: its server answers for some milliseconds more."""
        self.deaths += 1
        asyncio.get_running_loop().call_later(DEATH_TO_CLOSE_S, self._close_if_dead)

    def _close_if_dead(self) -> None:
        if self.listens and self.service is None:
            self._stop_listening()

    def _stop_listening(self) -> None:
        self.listens = False
        self.closed.set()

    def _drop(self, client: tuple[str, int]) -> None:
        self._calls[client[1]].cut()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """The double's answer.

        Raises:
            httpx.ConnectError: nobody listens.
            httpx.ReadError: the connection was cut.
        """
        await asyncio.sleep(ONE_WAY_S)
        if not self.listens:
            raise httpx.ConnectError("refused") from ConnectionRefusedError("refused")
        call = _Call(next(self._clients), request)
        self._calls[call.client] = call
        task = asyncio.create_task(self._serve(call))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        try:
            response = await call.reply
        finally:
            call.left.set()
            self._calls.pop(call.client, None)
        await asyncio.sleep(ONE_WAY_S)
        return response

    async def _serve(self, call: _Call) -> None:
        try:
            await self._app(call.scope(), call.receive, call.send)
            self.done(call.request)
        except Exception as error:  # noqa: BLE001 - an error of the double is a finding
            self._on_fault(f"the double failed at {call.path}: {error!r}")
            call.cut()


async def _never_restarts(_client: tuple[str, int] | None) -> None:
    raise NotImplementedError("the simulation restarts it from outside")


class _Call:
    """One request on a connection of its own."""

    def __init__(self, client: int, request: httpx.Request) -> None:
        self.client = client
        self.reply: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        self.left = asyncio.Event()
        self.path = request.url.path
        self.request = request
        self._body_given = False
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._content = b""

    def scope(self) -> Message:
        url = self.request.url
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.request.method,
            "scheme": "http",
            "path": url.path,
            "raw_path": url.raw_path,
            "query_string": url.query,
            "root_path": "",
            "headers": [(k.lower(), v) for k, v in self.request.headers.raw],
            "server": (url.host, url.port or 80),
            "client": ("sim", self.client),
        }

    async def receive(self) -> Message:
        if not self._body_given:
            self._body_given = True
            return {"type": "http.request", "body": self.request.content, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            return
        self._content += message.get("body", b"")
        if not message.get("more_body", False) and not self.reply.done():
            self.reply.set_result(
                httpx.Response(self._status, headers=self._headers, content=self._content)
            )

    def cut(self) -> None:
        """End the connection without an answer."""
        self.left.set()
        if not self.reply.done():
            self.reply.set_exception(httpx.ReadError("the connection was cut"))


class Route:
    """From one client to one process; the lifeline of who asks may end before or after a call."""

    def __init__(self) -> None:
        self.process: EngineProcess | None = None
        self.lifeline = Lifeline()

    async def carry(self, request: httpx.Request) -> httpx.Response:
        """Bring the request there and the answer back."""
        assert self.process is not None
        path = request.url.path
        self.lifeline.effect(f"before {path}")
        self.lifeline.asking(request)
        try:
            response = await self.process.answer(request)
        except BaseException:
            self.lifeline.answered(request, None)
            raise
        self.lifeline.answered(request, response)
        self.lifeline.effect(f"after {path}")
        return response


class SimulatedClient(EngineClient):
    """The real client over a `Route`."""

    def __init__(self) -> None:
        super().__init__("http://engine.invalid", timeouts=TIMEOUTS)
        self.route = Route()

    async def _send(self, request: EngineRequest) -> EngineAnswer:
        method, path, headers, content = request
        sent = httpx.Request(method, self.base_url + path, headers=headers, content=content)
        try:
            response = await self.route.carry(sent)
        except httpx.HTTPError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        return EngineAnswer(response.status_code, response.text)

    def attach(self, process: EngineProcess, lifeline: Lifeline) -> None:
        self.route.process = process
        self.route.lifeline = lifeline

    async def _knock(self) -> None:
        process = self.route.process
        assert process is not None
        self.route.lifeline.effect("knock")
        await asyncio.sleep(ONE_WAY_S)
        if not process.listens:
            raise ConnectionRefusedError("refused")

    async def wait_closed(self) -> None:
        process = self.route.process
        assert process is not None
        self.route.lifeline.effect("wait_closed")
        if not process.listens:
            raise EngineUnreachable("refused")
        await process.closed.wait()
