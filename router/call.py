"""A request as it comes in, and its passage at one replica."""

from __future__ import annotations

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
    """The session, or episode, that the client names; empty when it names none."""
    session = request.headers.get(SESSION_HEADER) or content.get("user")
    return session[:_EPISODE_MOST] if isinstance(session, str) else ""
