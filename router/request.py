"""A request as it comes in, and its passage at one replica."""

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

from policyline.router.affinity.affinity import Ticket
from policyline.router.affinity.prompts import Chain
from policyline.router.answers import Refused
from policyline.router.gate import Serve
from policyline.router.texts import cut

SESSION_HEADER: Final = "x-policyline-session"
_EPISODE_MOST: Final = 256
"""Characters of a session's name as it is kept; of a longer one its digest is kept."""
_CODINGS: Final[Mapping[str, int | None]] = {
    "": None,
    "identity": None,
    "gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}
"""Content codings of a request, and zlib's `wbits` for each; None: nothing is to be unpacked."""
_PROCESS: Final = os.urandom(10).hex()
_NUMBERS: Final = itertools.count(1)


@dataclass(slots=True)
class Call:
    """One request on its way."""

    request: web.BaseRequest
    path: str
    """Of the engine."""
    asked_name: str
    version: int
    body: bytes
    """As the engine gets it: with the policy's own name."""
    chain: Chain
    episode: str
    arrived_s: float
    """Monotonic."""
    id: str = field(default_factory=lambda: f"{_PROCESS}{next(_NUMBERS):012x}")
    """Unique for ever: 80 random bits of the process, and a number."""
    failed: set[str] = field(default_factory=set)
    """Replicas that failed it."""
    broken: int = 0
    """How many of them after it had been sent."""


@dataclass(slots=True)
class Passage:
    """A call at one replica; times are monotonic seconds."""

    call: Call
    serve: Serve
    ticket: Ticket
    sent_s: float
    first_s: float = 0.0
    noted: bool = False

    @property
    def replica(self) -> str:
        """Who has it."""
        return self.ticket.seat.replica


async def read_body(request: web.BaseRequest, most: int) -> bytes:
    """The body, whole, and unpacked where it is compressed.

    Raises:
        Refused: it is longer than `most` bytes, or not packed as its header says.
    """
    coding = request.headers.get("content-encoding", "").lower()
    if coding not in _CODINGS:
        raise Refused(
            415,
            "unknown_coding",
            f"content-encoding {cut(coding)} is not understood; send gzip, deflate or none",
        )
    body = await _received(request, most)
    return body if _CODINGS[coding] is None else _unpacked(body, coding, most)


async def _received(request: web.BaseRequest, most: int) -> bytes:
    too_long = (request.content_length or 0) > most
    parts: list[bytes] = []
    size = 0
    while not too_long and (part := await request.content.readany()):
        size += len(part)
        too_long = size > most
        parts.append(part)
    if too_long:
        raise _too_long(most)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unpacked(body: bytes, coding: str, most: int) -> bytes:
    """The body unpacked; of one that is too long no more than it takes to know that."""
    unpacker = zlib.decompressobj(_CODINGS[coding] or 0)
    try:
        unpacked = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise Refused(400, "invalid_body", f"the body is not {coding}: {error}") from error
    if len(unpacked) > most:
        raise _too_long(most)
    if not unpacker.eof or unpacker.unused_data:
        raise Refused(400, "invalid_body", f"the body is not one whole piece of {coding}")
    return unpacked


def _too_long(most: int) -> Refused:
    return Refused(413, "request_too_large", f"the request is longer than {most} bytes")


def parse_body(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a body.

    Raises:
        Refused: it is none.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Refused(400, "invalid_json", "the body is not a JSON object")
    return content


def session_of(request: web.BaseRequest, content: Mapping[str, Any]) -> str:
    """The session, or episode, that the client names; empty when it names none.

    A name longer than 256 characters is kept as `sha256:` and the digest of its UTF-8 in hex.
    """
    header = request.headers.get(SESSION_HEADER)
    session = _as_text(header) if header else content.get("user")
    if not isinstance(session, str):
        return ""
    if len(session) > _EPISODE_MOST:
        return f"sha256:{hashlib.sha256(session.encode()).hexdigest()}"
    return session


def _as_text(header: str) -> str:
    """A header's bytes as UTF-8, else as Latin-1."""
    # aiohttp keeps bytes that are no UTF-8 as lone surrogates, which nothing that stores text takes
    raw = header.encode(errors="surrogateescape")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
