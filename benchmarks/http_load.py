"""A load generator: so many requests in flight, each answer timed. Raw sockets, no library."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

PROMPT_TOKENS = 200


@dataclass(slots=True)
class HttpResult:
    """Latencies and failures of one run."""

    seconds: list[float] = field(default_factory=list)
    """One answer each, in the order of their ends."""
    bad: int = 0
    """Answers with another status than 200."""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head_end = self._data.find(b"\r\n\r\n")
        if head_end >= 0 and self._is_whole(head_end) and self._answer is not None:
            status = bytes(self._data[9:12])
            self._data.clear()
            self._answer.set_result(status)

    def _is_whole(self, head_end: int) -> bool:
        head = bytes(self._data[:head_end]).lower()
        if b"transfer-encoding: chunked" in head:
            return self._data.endswith(b"\r\n0\r\n\r\n")
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        return len(self._data) >= head_end + 4 + length

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(str(exc)))

    async def ask(self, request: bytes) -> bytes:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def request_bytes(port: int, model: str, number: int, *, stream: bool = False) -> bytes:
    """A completion as TRL asks for it; eight in a row have the same prompt."""
    first = 100 + number // 8
    content = {
        "model": model,
        "prompt": [first, *range(1000, 1000 + PROMPT_TOKENS - 1)],
        "max_tokens": 64,
        "temperature": 1.0,
        "seed": number,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": stream,
    }
    body = json.dumps(content).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(
    port: int, model: str, *, in_flight: int, total: int, stream: bool = False
) -> HttpResult:
    """Send `total` requests over `in_flight` connections."""
    loop, result = asyncio.get_running_loop(), HttpResult()
    requests = iter([request_bytes(port, model, n, stream=stream) for n in range(total)])

    async def work() -> None:
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", port)
        for request in requests:
            begun = time.perf_counter()
            status = await connection.ask(request)
            result.seconds.append(time.perf_counter() - begun)
            result.bad += status != b"200"
        connection.close()

    await asyncio.gather(*(work() for _ in range(in_flight)))
    return result
