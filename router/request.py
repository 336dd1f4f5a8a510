"""A client's request, and its attempts at replicas."""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import web

from policyline.router.affinity.affinity import Assignment
from policyline.router.affinity.prompts import Chain
from policyline.router.answers import HttpRefused
from policyline.router.gate import Serve, shorten

SESSION_HEADER: Final = "x-policyline-session"
_MAX_EPISODE_CHARS: Final = 256
"""A longer session name is replaced by its digest."""
_CODINGS: Final[Mapping[str, int | None]] = {
    "": None,
    "identity": None,
    "gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}
"""Content codings of a request, and zlib's `wbits` for each; None: not compressed."""
_PROCESS: Final = os.urandom(10).hex()
_NUMBERS: Final = itertools.count(1)


@dataclass(slots=True)
class Call:
    """One request while it is served."""

    request: web.BaseRequest
    path: str
    """Of the engine."""
    asked_name: str
    version: int
    body: bytes
    """As sent to the engine: `model` is the policy name."""
    chain: Chain
    episode: str
    arrived_s: float
    """Monotonic."""
    id: str = field(default_factory=lambda: f"{_PROCESS}{next(_NUMBERS):012x}")
    """Globally unique: 80 random bits of the process, and a counter."""
    failed: set[str] = field(default_factory=set)
    """Replicas that failed since all were last tried."""
    broken: int = 0
    """Number of attempts that failed after the request was sent."""


@dataclass(slots=True)
class Attempt:
    """One try of a call at one replica; times are monotonic seconds."""

    call: Call
    serve: Serve
    assignment: Assignment
    sent_s: float
    first_s: float = 0.0
    recorded: bool = False

    @property
    def replica(self) -> str:
        """Name of the replica."""
        return self.assignment.endpoint.replica


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The whole body, decompressed.

    Raises:
        HttpRefused: it is longer than `max_bytes`, or not compressed as its header says.
    """
    coding = request.headers.get("content-encoding", "").lower()
    if coding not in _CODINGS:
        raise HttpRefused(
            415,
            "unknown_coding",
            f"content-encoding {shorten(coding)} is not supported; send gzip, deflate or none",
        )
    body = await _receive(request, max_bytes)
    return body if _CODINGS[coding] is None else _decompress(body, coding, max_bytes)


async def _receive(request: web.BaseRequest, max_bytes: int) -> bytes:
    too_long = (request.content_length or 0) > max_bytes
    parts: list[bytes] = []
    size = 0
    while not too_long and (part := await request.content.readany()):
        size += len(part)
        too_long = size > max_bytes
        parts.append(part)
    if too_long:
        raise _too_long(max_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompress(body: bytes, coding: str, max_bytes: int) -> bytes:
    """The body decompressed; it stops as soon as the result is too long."""
    decompressor = zlib.decompressobj(_CODINGS[coding] or 0)
    try:
        data = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise HttpRefused(400, "invalid_body", f"the body is not {coding}: {error}") from error
    if len(data) > max_bytes:
        raise _too_long(max_bytes)
    if not decompressor.eof or decompressor.unused_data:
        raise HttpRefused(400, "invalid_body", f"the body is not exactly one {coding} stream")
    return data


def _too_long(max_bytes: int) -> HttpRefused:
    return HttpRefused(413, "request_too_large", f"the request is longer than {max_bytes} bytes")


def parse_body(body: bytes) -> Mapping[str, Any]:
    """Parse the JSON object in a body.

    Raises:
        HttpRefused: the body is not a JSON object.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise HttpRefused(400, "invalid_json", "the body is not a JSON object")
    return content


def session_of(request: web.BaseRequest, content: Mapping[str, Any]) -> str:
    """The session (episode) that the client names; empty when it names none.

    A name longer than 256 characters becomes `sha256:` and the digest of its UTF-8 in hex.
    """
    header = request.headers.get(SESSION_HEADER)
    session = _as_text(header) if header else content.get("user")
    if not isinstance(session, str):
        return ""
    if len(session) > _MAX_EPISODE_CHARS:
        return f"sha256:{hashlib.sha256(session.encode()).hexdigest()}"
    return session


def _as_text(header: str) -> str:
    """A header's bytes as UTF-8, else as Latin-1."""
    # aiohttp decodes other bytes to lone surrogates, which no database or JSON encoder accepts
    raw = header.encode(errors="surrogateescape")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
