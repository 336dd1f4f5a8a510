"""A bare pass-through on the router's libraries: `python -m benchmarks.bare_proxy URL,URL`.

What a proxy on aiohttp's server and client costs that decides nothing: read, send to the next
engine in turn, pass on. The floor for the router.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys

import aiohttp
from aiohttp import web


async def serve(urls: list[str]) -> None:
    """Listen at a free port, print it, and go on for ever."""
    order = itertools.cycle(urls)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=600.0),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("user-agent", "accept"),
    ) as session:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            url = next(order) + request.path
            async with session.post(url, data=body, headers=headers) as answer:
                shown = {"content-type": answer.headers["content-type"]}
                if answer.content_length is not None:
                    data = await answer.read()
                    return web.Response(body=data, status=answer.status, headers=shown)
                response = web.StreamResponse(status=answer.status, headers=shown)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response

        runner = web.ServerRunner(web.Server(handle, handler_cancellation=True, access_log=None))
        await runner.setup()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(runner, listener, backlog=1024).start()
        print(listener.getsockname()[1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1].split(",")))
