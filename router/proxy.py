"""One request: read it, place it, pass the answer through; elsewhere again where that is safe."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import msgspec
from aiohttp import web

from policyline.ledger.names import policy_name
from policyline.router.affinity.prompts import chain_of
from policyline.router.answers import Refused
from policyline.router.cancellation import Vigil
from policyline.router.dispatch import Placing
from policyline.router.errors import (
    SpoolUnusable,
    UpstreamBroken,
    UpstreamUnreachable,
    UpstreamVoided,
)
from policyline.router.metrics import Metrics
from policyline.router.replicas import Fleet
from policyline.router.request import Call, Passage, parse_body, read_body, session_of
from policyline.router.rollouts.audit import Audit
from policyline.router.settings import RouterSettings
from policyline.router.upstream import Answer, Upstream
from policyline.router.usage import TAIL_BYTES

log = logging.getLogger(__name__)

CLIENT_LEFT: Final = 499
"""Noted as the status of a request whose client left before the end; nginx's number."""
BROKE_OFF: Final = 502
"""Noted as the status of an answer that broke off after it had begun, or that a stop cut off."""
_MOST_BROKEN: Final = 2
"""Replicas that may break off over one request: a request that kills engines must not meet all."""
_WHOLE_BYTES: Final = 1 << 20
"""An answer up to this size is taken whole before its first byte goes out, so that it can still be
asked of another replica; larger ones and streams are passed on as they come."""


class Denied(Exception):
    """The engine says that it has no such model."""


class Proxy:
    """Answers completions.

    Args:
        settings: of the router.
        placing: finds version and replica.
        fleet: knows the block size.
        upstream: asks.
        vigil: watches over replicas that were asked.
        audit: notes each answer.
        metrics: count retries.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        placing: Placing,
        fleet: Fleet,
        upstream: Upstream,
        vigil: Vigil,
        audit: Audit,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._placing = placing
        self._fleet = fleet
        self._upstream = upstream
        self._vigil = vigil
        self._audit = audit
        self._metrics = metrics
        self._in_hand: set[asyncio.Task[Any]] = set()
        """One for each request."""
        self._cutting = False

    @property
    def in_hand(self) -> int:
        """Requests that are not answered yet, those that wait included."""
        return len(self._in_hand)

    def cut_off(self) -> None:
        """End every request in hand, and each that still comes: the router stops."""
        self._cutting = True
        for task in self._in_hand:
            task.cancel()

    async def answer(
        self, request: web.BaseRequest, path: str, run: str | None = None
    ) -> web.StreamResponse:
        """Answer one request.

        Args:
            request: the client's.
            path: of the engine.
            run: the trainer's run, when its URL was used.

        Raises:
            Refused: with this answer.
        """
        self._check_room()
        task = asyncio.current_task()
        assert task is not None
        self._in_hand.add(task)
        try:
            call = await self._read(request, path, run)
            return await self._serve(call)
        except asyncio.CancelledError as error:
            if not self._cutting:
                raise
            task.uncancel()
            raise _draining() from error
        finally:
            self._in_hand.discard(task)

    def _check_room(self) -> None:
        if self._cutting:
            raise _draining()
        if self.in_hand >= self._settings.max_in_flight:
            raise Refused(
                503,
                "overloaded",
                f"{self.in_hand} requests are in flight, as many as --max-in-flight allows",
                retry_after_s=1,
            )

    async def _read(self, request: web.BaseRequest, path: str, run: str | None) -> Call:
        arrived_s = time.monotonic()
        body = await read_body(request, self._settings.max_body_bytes)
        content = parse_body(body)
        name = content.get("model")
        session = session_of(request, content)
        version = await self._placing.version(name, run, session, arrived_s)
        policy = policy_name(self._settings.line, version)
        if policy != name:
            body = msgspec.json.encode({**content, "model": policy})
        return Call(
            request=request,
            path=path,
            asked_name=str(name),
            version=version,
            body=body,
            chain=chain_of(content, self._fleet.block_tokens),
            episode=session,
            arrived_s=arrived_s,
        )

    async def _serve(self, call: Call) -> web.StreamResponse:
        while True:
            passage = await self._placing.place(call)
            try:
                return await self._pass(passage)
            except UpstreamUnreachable as error:
                self._placing.unreachable(passage)
                self._go_elsewhere(passage, "unreachable", error)
            except UpstreamVoided as error:
                self._say_leaves(passage, "voided", error)
            except UpstreamBroken as error:
                call.broken += 1
                self._go_elsewhere(passage, "broken", error)
                if call.broken > _MOST_BROKEN:
                    failed = f"replica {passage.replica} failed: {error}"
                    raise Refused(502, "replica_failed", failed) from error
            except Denied:
                self._metrics.retries["denied"] += 1
                self._placing.contradicted(passage)
            finally:
                self._placing.leave(passage)

    def _go_elsewhere(self, passage: Passage, why: str, error: Exception) -> None:
        passage.call.failed.add(passage.replica)
        self._say_leaves(passage, why, error)

    def _say_leaves(self, passage: Passage, why: str, error: Exception) -> None:
        call = passage.call
        self._metrics.retries[why] += 1
        log.info(
            "request %s leaves %s: %s",
            call.id,
            passage.replica,
            error,
            extra={"event": "goes_elsewhere", "replica": passage.replica, "request": call.id},
        )

    async def _pass(self, passage: Passage) -> web.StreamResponse:
        """Ask the replica and pass its answer on.

        Raises:
            UpstreamFailed: before anything was passed on.
            Denied: the engine has no such model.
        """
        call = passage.call
        url = passage.ticket.seat.url + call.path
        answer: Answer | None = None
        try:
            with self._vigil.over(passage):
                answer = await self._upstream.ask(url, call.body, call.id)
                passage.first_s = time.monotonic()
                if answer.status >= 400:
                    await _check(answer, passage.replica)
                is_short = answer.length is not None and answer.length <= _WHOLE_BYTES
                body = await answer.read() if is_short else None
            if body is not None:
                return self._whole(passage, answer, body)
            return await self._stream(passage, answer)
        except (asyncio.CancelledError, ConnectionError):
            self._note_unended(passage, BROKE_OFF if self._cutting else CLIENT_LEFT, b"")
            raise
        finally:
            if answer is not None:
                answer.close()

    def _whole(self, passage: Passage, answer: Answer, body: bytes) -> web.Response:
        try:
            self._audit.note(passage, answer.status, body[-TAIL_BYTES:])
        except SpoolUnusable as error:
            raise Refused(503, "audit_unavailable", str(error), retry_after_s=5) from error
        headers = _headers(passage, answer)
        return web.Response(body=body, status=answer.status, headers=headers)

    async def _stream(self, passage: Passage, answer: Answer) -> web.StreamResponse:
        """Part by part; the note is written before the end. A break is one for the client too.

        Once it has begun, nothing but the client's leaving is raised: a second answer, to an
        error, would be taken for a part of this one.
        """
        request = passage.call.request
        response = web.StreamResponse(status=answer.status, headers=_headers(passage, answer))
        if answer.length is not None:
            response.content_length = answer.length
        await response.prepare(request)
        tail = b""
        try:
            while part := await answer.part():
                await response.write(part)
                tail = (tail + part)[-TAIL_BYTES:]
            self._audit.note(passage, answer.status, tail)
            await response.write_eof()
        except ConnectionError:
            raise
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            self._break_off(passage, tail)
        except Exception as error:
            expected = isinstance(error, UpstreamBroken | SpoolUnusable)
            log.warning(
                "the answer to %s breaks off: %s",
                passage.call.id,
                error,
                exc_info=None if expected else error,
            )
            self._break_off(passage, tail)
        return response

    def _break_off(self, passage: Passage, tail: bytes) -> None:
        self._note_unended(passage, BROKE_OFF, tail)
        transport = passage.call.request.transport
        if transport is not None:
            transport.abort()

    def _note_unended(self, passage: Passage, status: int, tail: bytes) -> None:
        """Nobody gets an answer any more, so that a note that cannot be written stops nothing."""
        try:
            self._audit.note(passage, status, tail)
        except Exception:
            log.exception("the end of request %s is not recorded", passage.call.id)


def _draining() -> Refused:
    return Refused(503, "draining", "the router stops; ask again, or another", retry_after_s=1)


async def _check(answer: Answer, replica: str) -> None:
    """Leave alone what is the client's business.

    Raises:
        Denied: vLLM 0.32 answers 404 with `NotFoundError` for a model that it does not have.
        UpstreamBroken: the engine failed; another may not.
        Refused: the replica does not let the router in.
    """
    if answer.status == 404:
        if b"does not exist" in await answer.read():
            raise Denied
        raise UpstreamBroken("it has no such route")
    if answer.status in {401, 403}:
        raise Refused(
            502,
            "replica_refuses_router",
            f"replica {replica} answers {answer.status} to the router; set its key with "
            "POLICYLINE_UPSTREAM_KEY",
        )
    if answer.status >= 500:
        text = (await answer.read())[:256].decode(errors="replace")
        raise UpstreamBroken(f"it answers {answer.status}: {text}")


def _headers(passage: Passage, answer: Answer) -> dict[str, str]:
    return {
        "content-type": answer.content_type,
        "x-policy-version": str(passage.call.version),
        "x-policy-digest": passage.serve.digest,
        "x-policy-replica": passage.replica,
        "x-request-id": passage.call.id,
    }
