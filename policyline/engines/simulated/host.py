"""What the double's routes need of the server around them, and the door before them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from policyline.engines.simulated.faults import Fault, FaultScript
from policyline.engines.simulated.service import Service
from policyline.engines.simulated.worker import Adapter

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM's API key guards: nothing else."""


@dataclass(slots=True)
class Host:
    """What the routes need of the server around them.

    Attributes:
        service: the present process of the server.
        faults: the script of misbehaviour.
        drop: cuts the connection of a client, given as (host, port).
        restart: ends this process and begins another; it spares the connection of one client.
        stale: the registry as the fault `stale` shows it.
        requests: how often each path was asked for, over all processes.
    """

    service: Service
    faults: FaultScript
    drop: Callable[[tuple[str, int]], None]
    restart: Callable[[tuple[str, int] | None], Awaitable[None]]
    stale: tuple[Adapter, ...] = ()
    requests: Counter[str] = field(default_factory=Counter)

    def script(self, fault: Fault) -> None:
        """Add a fault; `stale` remembers the registry of this moment."""
        if fault.kind == "stale":
            self.stale = tuple(self.service.registry.values())
        self.faults.add(fault)


class KeyGate:
    """The API key, which vLLM checks before it looks for the route."""

    def __init__(self, app: ASGIApp, host: Host) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or let the request in."""
        key = self._host.service.options.api_key
        app = self._app
        self._host.requests[scope["path"].rstrip("/")] += 1
        if key and scope["path"].startswith(_GUARDED):
            given = HttpRequest(scope).headers.get("authorization")
            app = self._app if given == f"Bearer {key}" else _UNAUTHORIZED
        with contextlib.suppress(asyncio.CancelledError):  # killed: there is nobody to tell
            await app(scope, receive, send)


_UNAUTHORIZED = JSONResponse({"error": "Unauthorized"}, 401)
