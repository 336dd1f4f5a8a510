"""One request: judge it, choose a replica, pass the answer through, note it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from aiohttp import web

from ledger.errors import LedgerUnavailable
from ledger.names import policy_name
from ledger.rollouts import NewRollout
from router.affinity import Affinity, Ticket
from router.answers import Refused
from router.bell import Bell
from router.errors import SpoolUnusable, UpstreamBroken, UpstreamUnreachable
from router.fleet import Fleet
from router.gate import POLICY_NOT_READY, POLICY_UNKNOWN, Look, Refuse, Serve, Verdict, Wait
from router.keeper import Keeper
from router.metrics import Metrics
from router.prompts import Chain, chain_of
from router.sessions import Sessions
from router.settings import RouterSettings
from router.spool import Spool
from router.trainer import Trainer
from router.upstream import Answer, Upstream
from router.usage import TAIL_BYTES, usage

log = logging.getLogger(__name__)

SESSION_HEADER: Final = "x-policyline-session"
CLIENT_LEFT: Final = 499
"""Noted as the status of a request whose client left before the end; nginx's number."""
_MOST_BROKEN: Final = 2
"""Replicas that may break off over one request: a request that kills engines must not meet all."""
_WHOLE_BYTES: Final = 1 << 20
"""An answer up to this size is taken whole before its first byte goes out, so that it can still be
asked of another replica; larger ones and streams are passed on as they come."""
_LOOK_AGAIN_S: Final = 0.5
"""A waiting request looks again at the latest after so long."""
_RETRY_ALL_S: Final = 0.2
"""When every replica has failed a request, before they are asked again."""


class Denied(Exception):
    """The engine says that it has no such model."""


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
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
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


class Proxy:
    """Answers completions.

    Args:
        settings: of the router.
        keeper: of the view.
        affinity: chooses.
        fleet: who cannot be reached.
        upstream: asks.
        sessions: of the alias.
        spool: gets a note of each answer.
        metrics: count.
        changed: rung when a wait may be over.
        trainer: knows trainers' names; None: no trainer's URL is served.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        keeper: Keeper,
        affinity: Affinity,
        fleet: Fleet,
        upstream: Upstream,
        sessions: Sessions,
        spool: Spool,
        metrics: Metrics,
        changed: Bell,
        trainer: Trainer | None,
    ) -> None:
        self._settings = settings
        self._keeper = keeper
        self._affinity = affinity
        self._fleet = fleet
        self._upstream = upstream
        self._sessions = sessions
        self._spool = spool
        self._metrics = metrics
        self._changed = changed
        self._trainer = trainer
        self.in_hand = 0
        """Requests that are not answered yet, those that wait included."""

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
        if self.in_hand >= self._settings.max_in_flight:
            raise Refused(503, "overloaded", "too many requests in flight", retry_after_s=1)
        self.in_hand += 1
        try:
            call = await self._read(request, path, run)
            return await self._serve(call)
        finally:
            self.in_hand -= 1

    async def _read(self, request: web.BaseRequest, path: str, run: str | None) -> Call:
        arrived_s = time.monotonic()
        body = await _body(request, self._settings.max_body_bytes)
        content = _parse(body)
        name = content.get("model")
        session = request.headers.get(SESSION_HEADER) or content.get("user") or ""
        episode = session if isinstance(session, str) else ""
        version = await self._version(name, run, episode, arrived_s)
        policy = policy_name(self._settings.line, version)
        if policy != name:
            body = json.dumps({**content, "model": policy}).encode()
        return Call(
            request=request,
            path=path,
            asked_name=str(name),
            version=version,
            body=body,
            chain=chain_of(content, self._fleet.block_tokens),
            episode=episode[:256],
            arrived_s=arrived_s,
        )

    async def _version(self, name: object, run: str | None, session: str, arrived_s: float) -> int:
        """The version that a request names, whatever it calls it."""
        if name == self._settings.alias:
            current = await self._current(arrived_s + self._settings.ready_wait_s)
            return self._sessions.version(session, current, arrived_s) if session else current
        if run is not None and self._trainer is not None and isinstance(name, str) and name:
            try:
                version = await self._trainer.version(run, name)
            except LedgerUnavailable as error:
                raise _ledger_away(error) from error
            if version is None:
                text = f"{name!r} was not loaded in run {run!r}"
                raise Refused(404, POLICY_UNKNOWN, text)
            return version
        assert self._keeper.gate is not None
        match self._keeper.gate.judge(name):
            case Refuse(status, code, message):
                raise Refused(status, code, message)
            case Serve(version=version) | Wait(version=version) | Look(version=version):
                return version

    async def _current(self, deadline_s: float) -> int:
        while (current := self._keeper.current()) is None:
            await self._wait(deadline_s, "nothing is current on this line yet")
        return current

    async def _serve(self, call: Call) -> web.StreamResponse:
        while True:
            passage = await self._place(call)
            try:
                return await self._pass(passage)
            except UpstreamUnreachable as error:
                self._fleet.cool(passage.ticket.seat)
                self._go_elsewhere(passage, "unreachable", error)
            except UpstreamBroken as error:
                call.broken += 1
                self._go_elsewhere(passage, "broken", error)
                if call.broken > _MOST_BROKEN:
                    raise Refused(502, "replica_failed", str(error)) from error
            except Denied:
                self._metrics.retries.labels("denied").inc()
                self._keeper.distrust(passage.ticket.seat, call.version)
            finally:
                self._affinity.end(passage.ticket)
                self._changed.ring()

    def _go_elsewhere(self, passage: Passage, why: str, error: Exception) -> None:
        replica = passage.ticket.seat.replica
        passage.call.failed.add(replica)
        self._metrics.retries.labels(why).inc()
        log.info(
            "request %s goes elsewhere, %s: %s",
            passage.call.id,
            replica,
            error,
            extra={"event": "goes_elsewhere", "replica": replica, "request": passage.call.id},
        )

    async def _place(self, call: Call) -> Passage:
        """Wait until a replica may be asked, choose it and count the request there."""
        deadline_s = call.arrived_s + self._settings.ready_wait_s
        while True:
            verdict = await self._judge(call.version)
            if isinstance(verdict, Wait):
                await self._wait(deadline_s, verdict.why)
                continue
            if all(seat.replica in call.failed for seat in verdict.seats):
                await self._wait(deadline_s, f"{verdict.name}: no replica answers", _RETRY_ALL_S)
                call.failed.clear()
                continue
            ticket = self._affinity.begin(
                call.version,
                verdict.digest,
                call.chain,
                self._fleet.warm(verdict.seats),
                avoid=call.failed,
            )
            if ticket is not None:
                self._metrics.choices.labels(ticket.kind).inc()
                return Passage(call, verdict, ticket, time.monotonic())
            await self._wait(deadline_s, f"{verdict.name}: no replica has a free slot for it")

    async def _judge(self, version: int) -> Serve | Wait:
        assert self._keeper.gate is not None
        verdict: Verdict = self._keeper.gate.judge_version(version)
        if isinstance(verdict, Look):
            try:
                verdict = await self._keeper.answer(version)
            except LedgerUnavailable as error:
                raise _ledger_away(error) from error
        match verdict:
            case Serve() | Wait():
                return verdict
            case Refuse(status, code, message):
                raise Refused(status, code, message)
            case Look():
                raise AssertionError("a fresh view has no answer")

    async def _wait(self, deadline_s: float, why: str, at_most_s: float = _LOOK_AGAIN_S) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise Refused(503, POLICY_NOT_READY, why, retry_after_s=1)
        await self._changed.wait(min(left_s, at_most_s))

    async def _pass(self, passage: Passage) -> web.StreamResponse:
        """Ask the replica and pass its answer on.

        Raises:
            UpstreamFailed: before anything was passed on.
            Denied: the engine has no such model.
        """
        call = passage.call
        url = passage.ticket.seat.url + call.path
        try:
            async with self._upstream.ask(url, call.body, call.id) as answer:
                passage.first_s = time.monotonic()
                await _check(answer)
                if answer.length is not None and answer.length <= _WHOLE_BYTES:
                    return self._whole(passage, answer, await answer.read())
                return await self._stream(passage, answer)
        except (asyncio.CancelledError, ConnectionError):
            self._note(passage, CLIENT_LEFT, b"")
            raise

    def _whole(self, passage: Passage, answer: Answer, body: bytes) -> web.Response:
        try:
            self._note(passage, answer.status, body[-TAIL_BYTES:])
        except SpoolUnusable as error:
            raise Refused(503, "audit_unavailable", str(error), retry_after_s=5) from error
        headers = _headers(passage, answer)
        return web.Response(body=body, status=answer.status, headers=headers)

    async def _stream(self, passage: Passage, answer: Answer) -> web.StreamResponse:
        """Part by part; the note is written before the end. A break is one for the client too."""
        request = passage.call.request
        response = web.StreamResponse(status=answer.status, headers=_headers(passage, answer))
        if answer.length is not None:
            response.content_length = answer.length
        await response.prepare(request)
        tail = b""
        try:
            async for part in answer.parts():
                tail = (tail + part)[-TAIL_BYTES:] if len(part) < TAIL_BYTES else part[-TAIL_BYTES:]
                await response.write(part)
            self._note(passage, answer.status, tail)
            await response.write_eof()
        except (UpstreamBroken, SpoolUnusable) as error:
            log.warning("answer to %s broke off: %s", passage.call.id, error)
            if isinstance(error, UpstreamBroken):
                self._note(passage, 502, tail)
            if request.transport is not None:
                request.transport.abort()
        return response

    def _note(self, passage: Passage, status: int, tail: bytes) -> None:
        """Write the rollout down, once."""
        if passage.noted:
            return
        passage.noted = True
        call, now = passage.call, time.monotonic()
        first_s = passage.first_s or now
        prompt_tokens, completion_tokens = usage(tail)
        self._spool.note(
            NewRollout(
                request=call.id,
                run=passage.serve.run,
                version=call.version,
                replica=passage.ticket.seat.replica,
                asked_name=call.asked_name,
                status=status,
                started_at=_utc(now - call.arrived_s),
                queue_s=passage.sent_s - call.arrived_s,
                prefill_s=first_s - passage.sent_s,
                decode_s=now - first_s,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                episode=call.episode,
            )
        )
        self._metrics.noted.inc()
        self._metrics.answers.labels(status).inc()
        self._metrics.queue_s.observe(passage.sent_s - call.arrived_s)
        self._metrics.answer_s.observe(now - passage.sent_s)


async def _body(request: web.BaseRequest, most: int) -> bytes:
    too_long = Refused(413, "request_too_large", f"the request is longer than {most} bytes")
    if (request.content_length or 0) > most:
        raise too_long
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > most:
            raise too_long
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _parse(body: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Refused(400, "invalid_json", "the body is not a JSON object")
    return content


async def _check(answer: Answer) -> None:
    """Leave alone what is the client's business.

    Raises:
        Denied: vLLM 0.32 answers 404 with `NotFoundError` for a model that it does not have.
        UpstreamBroken: the engine failed; another may not.
        Refused: the replica does not let the router in.
    """
    if answer.status < 400:
        return
    if answer.status == 404:
        if b"does not exist" in await answer.read():
            raise Denied
        raise UpstreamBroken("it has no such route")
    if answer.status in {401, 403}:
        raise Refused(502, "replica_refuses_router", f"a replica answers {answer.status}")
    if answer.status >= 500:
        text = (await answer.read())[:256].decode(errors="replace")
        raise UpstreamBroken(f"it answers {answer.status}: {text}")


def _headers(passage: Passage, answer: Answer) -> dict[str, str]:
    return {
        "content-type": answer.content_type,
        "x-policy-version": str(passage.call.version),
        "x-policy-digest": passage.serve.digest,
        "x-policy-replica": passage.ticket.seat.replica,
        "x-request-id": passage.call.id,
    }


def _utc(ago_s: float) -> str:
    return datetime.fromtimestamp(time.time() - ago_s, UTC).isoformat(timespec="microseconds")


def _ledger_away(error: LedgerUnavailable) -> Refused:
    return Refused(503, "ledger_away", str(error), retry_after_s=2)
