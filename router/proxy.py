"""Serves one request: reads it, assigns it to a replica, passes the answer on, retries if safe."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import msgspec
from aiohttp import web

from policyline.ledger.names import policy_name
from policyline.router.affinity.prompts import chain_of
from policyline.router.answers import HttpRefused
from policyline.router.cancellation import InFlightCanceller
from policyline.router.dispatch import Dispatcher
from policyline.router.errors import (
    SpoolUnusable,
    UpstreamAckLost,
    UpstreamBroken,
    UpstreamUnreachable,
)
from policyline.router.metrics import Metrics
from policyline.router.replicas import ReplicaMonitor
from policyline.router.request import Attempt, Call, parse_body, read_body, session_of
from policyline.router.rollouts.audit import TAIL_BYTES, Audit
from policyline.router.settings import RouterSettings
from policyline.router.upstream import Answer, Upstream

log = logging.getLogger(__name__)

CLIENT_LEFT: Final = 499
"""Recorded as the status when the client disconnected before the end, as nginx does."""
CUT_SHORT: Final = 502
"""Recorded as the status of an answer that a replica or the router's stop cut short."""
_MAX_BROKEN: Final = 2
"""Replicas that may fail on one request: one that kills engines must not reach the whole fleet."""
_MAX_BUFFERED_BYTES: Final = 1 << 20
"""An answer up to this size is read completely before its first byte is sent, so that the request
can still be retried. Larger answers and streams are passed on as they come."""


class ModelNotFound(Exception):
    """The engine answers that it has no such model."""


class Proxy:
    """Answers completions.

    Args:
        settings: of the router.
        dispatcher: finds version and replica.
        monitor: knows the block size.
        upstream: the HTTP client.
        canceller: ends attempts at replicas that lost their ack.
        audit: records each answer.
        metrics: count retries.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        dispatcher: Dispatcher,
        monitor: ReplicaMonitor,
        upstream: Upstream,
        canceller: InFlightCanceller,
        audit: Audit,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._monitor = monitor
        self._upstream = upstream
        self._canceller = canceller
        self._audit = audit
        self._metrics = metrics
        self._open_requests: set[asyncio.Task[Any]] = set()
        """One task for each request."""
        self._stopping = False

    @property
    def open_requests(self) -> int:
        """Number of requests that are not answered yet, including those that wait."""
        return len(self._open_requests)

    def cancel_all(self) -> None:
        """The router stops: end every open request, and refuse new ones."""
        self._stopping = True
        for task in self._open_requests:
            task.cancel()

    async def answer(
        self, request: web.BaseRequest, path: str, run: str | None = None
    ) -> web.StreamResponse:
        """Answer one request.

        Args:
            request: the client's.
            path: on the engine.
            run: of the trainer whose URL was used, if any.

        Raises:
            HttpRefused: with this answer.
            LedgerUnavailable: only the ledger knows the version that is asked for.
        """
        self._check_capacity()
        task = asyncio.current_task()
        assert task is not None
        self._open_requests.add(task)
        try:
            call = await self._read(request, path, run)
            return await self._serve(call)
        except asyncio.CancelledError as error:
            if not self._stopping:
                raise
            task.uncancel()
            raise _draining() from error
        finally:
            self._open_requests.discard(task)

    def _check_capacity(self) -> None:
        if self._stopping:
            raise _draining()
        if self.open_requests >= self._settings.max_in_flight:
            raise HttpRefused(
                503,
                "overloaded",
                f"{self.open_requests} requests are in flight, as many as --max-in-flight allows",
                retry_after_s=1,
            )

    async def _read(self, request: web.BaseRequest, path: str, run: str | None) -> Call:
        arrived_s = time.monotonic()
        body = await read_body(request, self._settings.max_body_bytes)
        content = parse_body(body)
        name = content.get("model")
        session = session_of(request, content)
        version = await self._dispatcher.version(name, run, session, arrived_s)
        policy = policy_name(self._settings.line, version)
        if policy != name:
            body = msgspec.json.encode({**content, "model": policy})
        return Call(
            request=request,
            path=path,
            asked_name=str(name),
            version=version,
            body=body,
            chain=chain_of(content, self._monitor.block_tokens),
            episode=session,
            arrived_s=arrived_s,
        )

    async def _serve(self, call: Call) -> web.StreamResponse:
        while True:
            attempt = await self._dispatcher.assign(call)
            try:
                return await self._try(attempt)
            except UpstreamUnreachable as error:
                self._monitor.mark_unreachable(attempt.assignment.endpoint)
                call.failed.add(attempt.replica)
                self._count_retry(attempt, "unreachable", error)
            except UpstreamAckLost as error:
                self._count_retry(attempt, "ack_lost", error)
            except UpstreamBroken as error:
                call.broken += 1
                call.failed.add(attempt.replica)
                self._count_retry(attempt, "broken", error)
                if call.broken > _MAX_BROKEN:
                    failed = f"replica {attempt.replica} failed: {error}"
                    raise HttpRefused(502, "replica_failed", failed) from error
            except ModelNotFound:
                self._metrics.retries.labels("denied").inc()
                self._dispatcher.distrust_ack(attempt)
            finally:
                self._dispatcher.release(attempt)

    def _count_retry(self, attempt: Attempt, why: str, error: Exception) -> None:
        call = attempt.call
        self._metrics.retries.labels(why).inc()
        log.info(
            "request %s is retried; its attempt at %s failed: %s",
            call.id,
            attempt.replica,
            error,
            extra={"event": "request_retried", "replica": attempt.replica, "request": call.id},
        )

    async def _try(self, attempt: Attempt) -> web.StreamResponse:
        """Send the request to the replica and pass its answer on.

        Raises:
            UpstreamFailed: nothing was passed on yet.
            ModelNotFound: the engine has no such model.
        """
        call = attempt.call
        url = attempt.assignment.endpoint.url + call.path
        answer: Answer | None = None
        try:
            async with self._canceller.scope(attempt):
                answer = await self._upstream.post(url, call.body, call.id)
                attempt.first_s = time.monotonic()
                if answer.status >= 400:
                    await _check(answer, attempt.replica)
                is_short = answer.length is not None and answer.length <= _MAX_BUFFERED_BYTES
                body = await answer.read() if is_short else None
            if body is not None:
                return self._send_whole(attempt, answer, body)
            return await self._send_stream(attempt, answer)
        except (asyncio.CancelledError, ConnectionError):
            self._record_unended(attempt, CUT_SHORT if self._stopping else CLIENT_LEFT, b"")
            raise
        finally:
            if answer is not None:
                answer.close()

    def _send_whole(self, attempt: Attempt, answer: Answer, body: bytes) -> web.Response:
        try:
            self._audit.record(attempt, answer.status, body[-TAIL_BYTES:])
        except SpoolUnusable as error:
            raise HttpRefused(503, "audit_unavailable", str(error), retry_after_s=5) from error
        headers = _headers(attempt, answer)
        return web.Response(body=body, status=answer.status, headers=headers)

    async def _send_stream(self, attempt: Attempt, answer: Answer) -> web.StreamResponse:
        """Pass an answer on part by part; it is recorded before its end is sent.

        After the first part an error only closes the connection: a second answer would be taken
        for a part of this one. A disconnect of the client is raised.
        """
        request = attempt.call.request
        response = web.StreamResponse(status=answer.status, headers=_headers(attempt, answer))
        if answer.length is not None:
            response.content_length = answer.length
        await response.prepare(request)
        tail = b""
        try:
            while part := await answer.part():
                await response.write(part)
                tail = (tail + part)[-TAIL_BYTES:]
            self._audit.record(attempt, answer.status, tail)
            await response.write_eof()
        except ConnectionError:
            raise
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            self._abort(attempt, tail)
        except Exception as error:
            expected = isinstance(error, UpstreamBroken | SpoolUnusable)
            log.warning(
                "the answer to request %s is cut short: %s",
                attempt.call.id,
                error,
                exc_info=None if expected else error,
            )
            self._abort(attempt, tail)
        return response

    def _abort(self, attempt: Attempt, tail: bytes) -> None:
        self._record_unended(attempt, CUT_SHORT, tail)
        transport = attempt.call.request.transport
        if transport is not None:
            transport.abort()

    def _record_unended(self, attempt: Attempt, status: int, tail: bytes) -> None:
        """Record an answer that nobody gets, so that a failure to record it harms nobody."""
        try:
            self._audit.record(attempt, status, tail)
        except Exception:
            log.exception("request %s could not be recorded", attempt.call.id)


def _draining() -> HttpRefused:
    return HttpRefused(
        503, "draining", "the router stops; retry, or ask another router", retry_after_s=1
    )


async def _check(answer: Answer, replica: str) -> None:
    """Raise for an error of the replica; an error of the client is passed on to it.

    Raises:
        ModelNotFound: vLLM 0.32 answers 404 with `NotFoundError` for a model that it does not have.
        UpstreamBroken: the engine failed; another may not.
        HttpRefused: the replica refuses the router's key.
    """
    if answer.status == 404:
        if b"does not exist" in await answer.read():
            raise ModelNotFound
        raise UpstreamBroken("it has no such route")
    if answer.status in {401, 403}:
        raise HttpRefused(
            502,
            "replica_refuses_router",
            f"replica {replica} answers {answer.status} to the router; set its key with "
            "POLICYLINE_UPSTREAM_KEY",
        )
    if answer.status >= 500:
        text = (await answer.read())[:256].decode(errors="replace")
        raise UpstreamBroken(f"it answers {answer.status}: {text}")


def _headers(attempt: Attempt, answer: Answer) -> dict[str, str]:
    return {
        "content-type": answer.content_type,
        "x-policy-version": str(attempt.call.version),
        "x-policy-digest": attempt.serve.digest,
        "x-policy-replica": attempt.replica,
        "x-request-id": attempt.call.id,
    }
