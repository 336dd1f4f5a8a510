"""The way to one vLLM server: HTTP requests with time limits, and when its process is gone."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp

from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.base_url import check_base_url
from policyline.watcher.vllm.errors import (
    EngineDead,
    EngineError,
    EngineFault,
    EngineTimeout,
    EngineUnreachable,
    Route,
    classify,
)

_KEEP_CONNECTION_S = 2.0
"""Reuse of an idle connection, in seconds. vLLM closes one after 5 s (its
VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent at that moment would be lost."""


class EngineRequest(NamedTuple):
    """What the server is asked; the path begins after the base URL."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    content: bytes | None = None


class EngineAnswer(NamedTuple):
    """What the server answered."""

    status: int
    text: str


class EngineConnection:
    """Connections to one vLLM server.

    Close it with `aclose()` or `async with`. Use it from one event loop.

    Args:
        base_url: of the server, http or https; it may end in a path, not in `/v1`.
        api_key: sent to this server only; it never appears in a repr, an error or a log.
        timeouts: one time limit for each kind of call.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeouts: EngineTimeouts | None = None,
    ) -> None:
        self.base_url = check_base_url(base_url)
        self.timeouts = timeouts or EngineTimeouts()
        self._api_key = _header_value(api_key)
        parts = urlsplit(self.base_url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._in_flight: dict[asyncio.Timeout, None] = {}
        self._given_up: set[asyncio.Timeout] = set()
        self._http: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def give_up_if_dead(self) -> bool:
        """Fail every call in flight if nobody listens any more; return whether that is so.

        An engine of vLLM 0.32 that dies during a load never answers it, and the call keeps the
        dead process alive with its port closed.
        """
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                await self._knock()
        except ConnectionRefusedError:
            now = asyncio.get_running_loop().time()
            for limit in self._in_flight:
                limit.reschedule(now)
            self._given_up = set(self._in_flight)
            return True
        except (OSError, TimeoutError):
            return False
        return False

    async def _knock(self) -> None:
        """See whether somebody listens.

        Raises:
            OSError: no connection.
        """
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.transport.abort()

    async def wait_closed(self) -> None:
        """Return when the engine, or something between, closes a connection opened now.

        A restart or a death of the process is so known at once. Nothing is sent, and vLLM closes
        no connection on which nothing was asked. Cancel it to stop waiting.
        """
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls or None
                )
        except (OSError, TimeoutError) as error:
            raise EngineUnreachable(f"cannot connect to {self.base_url}: {error}") from error
        try:
            # The kernel then notices a machine that vanished without closing its connections.
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with contextlib.suppress(OSError):
                await reader.read(1)
        finally:
            writer.transport.abort()

    async def _get(self, path: str, route: Route = "plain", *, limit_s: float | None = None) -> str:
        limit_s = self.timeouts.observe_s if limit_s is None else limit_s
        return await self._ask(EngineRequest("GET", path), route, limit_s)

    async def _post(
        self,
        path: str,
        route: Route,
        limit_s: float,
        body: Mapping[str, Any] | None = None,
        *,
        last: bool = False,
    ) -> str:
        """POST `body` as JSON; `last` has the server close the connection after its answer."""
        headers = {"Connection": "close"} if last else {}
        if body is None:
            return await self._ask(EngineRequest("POST", path, headers), route, limit_s)
        headers["Content-Type"] = "application/json"
        content = json.dumps(body).encode()
        return await self._ask(EngineRequest("POST", path, headers, content), route, limit_s)

    async def _ask(self, request: EngineRequest, route: Route, limit_s: float) -> str:
        call = f"{request.method} {self.base_url}{request.path}"
        limit = asyncio.timeout(limit_s)
        self._in_flight[limit] = None
        try:
            async with limit:
                answer = await self._send(request)
        except aiohttp.ClientError as error:  # some are a TimeoutError as well
            raise EngineUnreachable(f"{call}: {_cause(error)}") from error
        except TimeoutError as error:
            if limit in self._given_up:
                raise EngineDead(f"{call}: nobody listens at {self.base_url} any more") from error
            raise EngineTimeout(f"no answer to {call} within {limit_s:g} s") from error
        finally:
            del self._in_flight[limit]
            self._given_up.discard(limit)
        if answer.status >= 300:
            raise self._failure(route, answer)
        return answer.text

    async def _send(self, request: EngineRequest) -> EngineAnswer:
        """One request and its whole answer.

        Raises:
            aiohttp.ClientError: no connection, or it broke.
        """
        if self._http is None:
            self._http = self._session()
        async with self._http.request(
            request.method,
            self.base_url + request.path,
            headers=request.headers,
            data=request.content,
            allow_redirects=False,
        ) as answer:
            return EngineAnswer(answer.status, await answer.text(errors="replace"))

    def _session(self) -> aiohttp.ClientSession:
        """Made inside the event loop, as aiohttp demands."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_CONNECTION_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_s),
        )

    def _failure(self, route: Route, answer: EngineAnswer) -> EngineError:
        text = answer.text
        if self._api_key is not None:
            text = text.replace(self._api_key, "***")
        if answer.status < 400:
            return EngineFault(f"unexpected redirect: {text}", status=answer.status)
        return classify(route, answer.status, text)


def _header_value(api_key: str | None) -> str | None:
    """The key as a header can carry it; a mounted secret often ends with a line end.

    Raises:
        ValueError: a header cannot carry it.
    """
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the API key holds a character that an HTTP header cannot carry")
    return key or None


def _cause(error: aiohttp.ClientError) -> str:
    """In the words of the system where it has some."""
    if isinstance(error, aiohttp.ClientOSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
