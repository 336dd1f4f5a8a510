"""Serves doubles in the running event loop."""

import asyncio
import socket
from collections import Counter
from typing import Self

import uvicorn

from policyline.engines.simulated.app import Host, create_app
from policyline.engines.simulated.faults import Fault
from policyline.engines.simulated.service import Service, ServiceOptions

_DEATH_TO_CLOSE_S = 0.02
"""From the engine's death to the closing of the port: vLLM answers 503 for some milliseconds."""


class SimulatedServer:
    """One double on a port of 127.0.0.1, served by the running event loop.

    Its port stays the same over `restart()`. Use it as `async with SimulatedServer() as server:`.

    Args:
        options: how it is started.
        port: 0 for any free one.
    """

    def __init__(self, options: ServiceOptions | None = None, *, port: int = 0) -> None:
        self.options = options or ServiceOptions()
        self.port = port
        self.closed = asyncio.Event()
        """Set while nothing listens: before the start and after death and `kill`."""
        self.closed.set()
        self._http: uvicorn.Server | None = None
        self._started_at = 0.0
        self._host = Host(self._begin(), [], self._drop, self.restart)

    @property
    def url(self) -> str:
        """Base URL, once started."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def service(self) -> Service:
        """The present process of the server, for tests that look inside."""
        return self._host.service

    @property
    def requests(self) -> Counter[str]:
        """How often each path was asked for, over all processes."""
        return self._host.requests

    def script(self, fault: Fault) -> None:
        """Have the server misbehave; faults outlive a restart."""
        self._host.script(fault)

    def clear_faults(self) -> None:
        """Have the server behave again."""
        self._host.faults.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Begin the first process and listen."""
        await self._listen()

    async def restart(self, asker: tuple[str, int] | None = None) -> None:
        """End this process at once, as `kill` does, and begin another on the same port.

        The connection of `asker`, a client as (host, port), stays open to answer it.
        """
        await self.kill(asker)
        self._host.service = self._begin()
        await self._listen()

    async def kill(self, asker: tuple[str, int] | None = None) -> None:
        """Vanish as after SIGKILL: every connection but `asker`'s is cut."""
        if self._http is None:
            return
        http, self._http = self._http, None
        await self.service.stop()
        for listener in http.servers:
            listener.close()
        for connection in list(http.server_state.connections):
            if connection.transport.get_extra_info("peername") != asker:
                connection.transport.abort()
        await asyncio.sleep(0)  # uvicorn notices the cut connections, and then complains no more
        present = asyncio.current_task()
        tasks = [task for task in http.server_state.tasks if task is not present]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.closed.set()

    async def terminate(self) -> None:
        """Do what vLLM does on SIGTERM: stop listening, wait for clients that wait in vain."""
        if self._http is None:
            return
        await self.service.stop()
        self._close_idle()
        while self._http.server_state.tasks:
            await asyncio.wait(list(self._http.server_state.tasks))

    def _begin(self) -> Service:
        service = Service(self.options, self._on_death)
        service.started_at = max(service.started_at, self._started_at + 0.01)
        self._started_at = service.started_at
        return service

    async def _listen(self) -> None:
        # With the protocol named, asyncio switches Nagle's algorithm off: 40 ms for each answer.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(
            create_app(self._host), log_config=None, access_log=False, lifespan="off"
        )
        config.load()
        http = uvicorn.Server(config)
        http.lifespan = config.lifespan_class(config)
        await http.startup(sockets=[sock])
        self._http = http
        self.closed.clear()

    def _on_death(self) -> None:
        asyncio.get_running_loop().call_later(_DEATH_TO_CLOSE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Stop listening, and close the connections without a request in flight."""
        if self._http is None:
            return
        for listener in self._http.servers:
            listener.close()
        for connection in list(self._http.server_state.connections):
            connection.shutdown()
        self.closed.set()

    def _drop(self, client: tuple[str, int]) -> None:
        if self._http is None:
            return
        for connection in list(self._http.server_state.connections):
            if connection.transport.get_extra_info("peername") == client:
                connection.transport.abort()
