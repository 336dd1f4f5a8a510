"""A request as it comes in, and its passage at one replica."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import web

from router.affinity import Ticket
from router.answers import Refused
from router.gate import Serve
from router.prompts import Chain

SESSION_HEADER: Final = "x-policyline-session"
_EPISODE_MOST: Final = 256
"""Characters of a session's name as it is kept; of a longer one its digest is kept."""
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
    """The body, whole.

    Raises:
        Refused: it is longer than `most` bytes.
    """
    too_long = (request.content_length or 0) > most
    parts: list[bytes] = []
    size = 0
    while not too_long and (part := await request.content.readany()):
        size += len(part)
        too_long = size > most
        parts.append(part)
    if too_long:
        raise Refused(413, "request_too_large", f"the request is longer than {most} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


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
    """A header's bytes as UTF-8, else as Latin-1: aiohttp keeps odd bytes as lone surrogates,
    which nothing that stores text takes."""
    raw = header.encode(errors="surrogateescape")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
