"""The peer of trainer_stall: what a trainer needs that has TRL's own sync and two servers.

    python benchmarks/broadcast_proxy.py PORT URL URL ...   # BUCKET_S, RETRY_S in the environment

Control calls go to every server, completions to the least loaded one. With BUCKET_S > 0 an adapter
is seen that many seconds after it was renamed, at the next of the attempts, RETRY_S apart. GET
/stalls reports when generation was paused and when each load ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

EVERYWHERE = ("/pause", "/resume", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/health")
METHODS = ["GET", "POST"]


class BroadcastProxy:
    """Forwards; remembers pauses and loads."""

    def __init__(self, servers: list[str], bucket_s: float, retry_s: float) -> None:
        self._servers = servers
        self._bucket_s = bucket_s
        self._retry_s = retry_s
        self._in_flight: Counter[str] = Counter()
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        self._paused_at = 0.0
        self._stalls: list[dict[str, float]] = []

    async def forward(self, request: Request) -> Response:
        """Any call."""
        path, body = request.url.path, await request.body()
        if path == "/stalls":
            return JSONResponse(self._stalls)
        if path not in EVERYWHERE:
            return await self._one(request, body)
        if path == "/pause":
            self._paused_at = time.time()
        if path == "/v1/load_lora_adapter" and self._bucket_s:
            await self._until_visible(Path(json.loads(body)["lora_path"]))
        answers = await asyncio.gather(*(self._send(s, request, body) for s in self._servers))
        self._record(path)
        return next((a for a in answers if a.status_code != 200), answers[0])

    def _record(self, path: str) -> None:
        now = time.time()
        if path == "/v1/load_lora_adapter":
            self._stalls.append({"loaded_at": now})
        if path == "/resume":
            self._stalls[-1] |= {"paused_s": now - self._paused_at, "resumed_at": now}

    async def _until_visible(self, adapter: Path) -> None:
        left_s = _renamed_at(adapter) + self._bucket_s - time.time()
        await asyncio.sleep(math.ceil(left_s / self._retry_s) * self._retry_s)

    async def _one(self, request: Request, body: bytes) -> Response:
        server = min(self._servers, key=lambda s: self._in_flight[s])
        self._in_flight[server] += 1
        try:
            return await self._send(server, request, body)
        finally:
            self._in_flight[server] -= 1

    async def _send(self, server: str, request: Request, body: bytes) -> Response:
        url = server + request.url.path
        headers = {"content-type": "application/json"}
        answer = await self._client.request(
            request.method, url, params=request.query_params, content=body, headers=headers
        )
        kind = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, media_type=kind)


def _renamed_at(adapter: Path) -> float:
    return adapter.stat().st_ctime


def serve(port: int, servers: list[str]) -> None:
    """Run it."""
    bucket_s, retry_s = (float(os.environ.get(k, d)) for k, d in _DEFAULTS)
    proxy: Any = BroadcastProxy(servers, bucket_s, retry_s)
    app = Starlette(routes=[Route("/{path:path}", proxy.forward, methods=METHODS)])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


_DEFAULTS = (("BUCKET_S", "0"), ("RETRY_S", "0.5"))

if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
