"""The HTTP server of sidecar and router: aiohttp's low-level one, on one address."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from policyline.errors import ListenFailed

_LEVEL: Final = logging.INFO
_BACKLOG: Final = 1024

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves one handler in the running loop.

    Args:
        handler: answers every request; it is cancelled when its client leaves.
        shutdown_timeout_s: how long `close` waits for answers that are under way.
    """

    def __init__(self, handler: Handler, *, shutdown_timeout_s: float) -> None:
        self._handler = handler
        self._shutdown_timeout_s = shutdown_timeout_s
        self._runner: web.ServerRunner | None = None
        self._site: web.SockSite | None = None

    async def listen(self, host: str, port: int) -> int:
        """Accept connections; 0 takes a free port. Returns the port.

        Raises:
            ListenFailed: the address cannot be used.
        """
        server = web.Server(
            self._handler,
            handler_cancellation=True,
            logger=_logger(),
            access_log=None,
            auto_decompress=False,  # a handler unpacks, and answers what cannot be unpacked
        )
        listener = _listener(host, port)
        self._runner = web.ServerRunner(server, shutdown_timeout=self._shutdown_timeout_s)
        await self._runner.setup()
        self._site = web.SockSite(self._runner, listener, backlog=_BACKLOG)
        await self._site.start()
        return int(self._runner.addresses[0][1])

    async def stop_listening(self) -> None:
        """Accept no more connections; those that are open go on. Idempotent."""
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    async def close(self) -> None:
        """End every connection. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol named, asyncio switches Nagle's algorithm off
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ListenFailed(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --listen"
        ) from error
    return listener


def _logger() -> logging.Logger:
    """The logger for aiohttp's server."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_without_headers)  # adding it again changes nothing
    return logger


def _without_headers(record: logging.LogRecord) -> bool:
    """Whether the record is logged; one of malformed HTTP is reduced to the kind of its error.

    aiohttp logs a request that is no HTTP with a traceback and the header that is wrong, which may
    be the one with the key.
    """
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    record.msg = f"{record.msg}: malformed HTTP (%s)"
    record.args = (*(record.args if isinstance(record.args, tuple) else ()), type(error).__name__)
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = _LEVEL, logging.getLevelName(_LEVEL)
    return logging.getLogger(record.name).isEnabledFor(_LEVEL)
