"""An engine that answers after a fixed time: `python -m benchmarks.fixed_engine`; prints its port.

As little of a server as HTTP allows, so that what is measured is the proxy before it: a completion
after 20 ms, or 50 events of a stream 5 ms apart; and the two questions that a router asks.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

ANSWER_S: Final = 0.02
CHUNKS: Final = 50
CHUNK_S: Final = 0.005
_TOKENS: Final = 64
_CHOICE = {
    "index": 0,
    "text": "x" * 200,
    "token_ids": list(range(_TOKENS)),
    "logprobs": {"token_logprobs": [-0.123456] * _TOKENS},
}
_USAGE = {"prompt_tokens": 200, "total_tokens": 200 + _TOKENS, "completion_tokens": _TOKENS}
_BODY = json.dumps({"id": "cmpl-1", "choices": [_CHOICE], "usage": _USAGE}).encode()
_EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"hello"}]}\n\n'
_METRICS = b'vllm:cache_config_info{block_size="16"} 1.0\n'


def _answer(body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_WHOLE = _answer(_BODY)
_SHOWN = _answer(_METRICS, "text/plain")
_BEGIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = f"{len(_EVENT):x}\r\n".encode() + _EVENT + b"\r\n"
_END = b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection; requests come with their length, one after the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._data += data
        while (head_end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:head_end].lower()
            body_at, length = head_end + 4, _length(head)
            if len(self._data) < body_at + length:
                return
            body = self._data[body_at : body_at + length]
            self._data = self._data[body_at + length :]
            self._begin(head, body)

    def _begin(self, head: bytes, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        if head.startswith(b"get"):
            self._write(_SHOWN)
        elif b'"stream": true' in body:
            self._write(_BEGIN)
            self._left = CHUNKS
            loop.call_later(CHUNK_S, self._step)
        else:
            loop.call_later(ANSWER_S, self._write, _WHOLE)

    def _step(self) -> None:
        self._write(_CHUNK if self._left else _END)
        if self._left:
            self._left -= 1
            asyncio.get_running_loop().call_later(CHUNK_S, self._step)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _length(head: bytes) -> int:
    at = head.find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def serve() -> None:
    """Listen at a free port, print it, and go on for ever."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
