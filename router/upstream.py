"""The HTTP client for replicas (aiohttp, see docs/decisions/0012)."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, Self

import aiohttp

from policyline.router.errors import UpstreamBroken, UpstreamUnreachable

_KEEPALIVE_S: Final = 2.0
"""vLLM (uvicorn) closes idle connections after 5 s; the router closes them earlier."""
_GET_TIMEOUT_S: Final = 5.0
"""Timeout of `get_json` and `get_text`."""


class Answer:
    """An answer whose headers have arrived."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")
        self.length = response.content_length
        """Length of the body in bytes; None for a stream."""

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            UpstreamBroken: the connection broke.
        """
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamBroken(f"the answer broke off: {error!r:.200}") from error

    async def part(self) -> bytes:
        """The next part of the body as it comes; empty at the end. Reads only what is taken.

        Raises:
            UpstreamBroken: the connection broke.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamBroken(f"the answer broke off: {error!r:.200}") from error

    def close(self) -> None:
        """Release the connection. Before the end this closes it, and vLLM aborts the request."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """Connections to all replicas.

    Args:
        api_key: sent as bearer to every replica; None: no key is sent.
        connect_timeout_s: of a new connection, seconds.
        read_timeout_s: between two parts of an answer, and until its first, seconds.
    """

    def __init__(
        self, *, api_key: str | None, connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=self._timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept"),
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, url: str, body: bytes, request_id: str) -> Answer:
        """POST a request. The caller closes the answer.

        Args:
            url: of the replica, with the path.
            body: JSON.
            request_id: shown in vLLM's log.

        Raises:
            UpstreamUnreachable: no connection; the request was not sent.
            UpstreamBroken: the request was sent, and no answer came.
        """
        assert self._session is not None
        headers = {**self._headers, "x-request-id": request_id}
        try:
            return Answer(
                await self._session.post(url, data=body, headers=headers, allow_redirects=False)
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamUnreachable(f"cannot connect: {error!r:.200}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamBroken(f"no answer: {error!r:.200}") from error

    async def get_json(self, url: str) -> Any:
        """GET a small JSON answer.

        Raises:
            UpstreamUnreachable: no answer, or none with status 200.
        """
        text = await self.get_text(url)
        try:
            return json.loads(text)
        except ValueError as error:
            raise UpstreamUnreachable(f"{url} does not answer with JSON") from error

    async def get_text(self, url: str) -> str:
        """GET a small answer.

        Raises:
            UpstreamUnreachable: no answer, or none with status 200.
        """
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(_GET_TIMEOUT_S),
                self._session.get(url, headers=self._headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise UpstreamUnreachable(f"{url} answers {response.status}")
                return await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamUnreachable(f"{url}: {error!r:.200}") from error
