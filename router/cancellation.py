"""Cancels requests at replicas that lost their ack, so that another replica can answer them."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from policyline.router.errors import UpstreamAckLost
from policyline.router.gate import Endpoint, Gate, Serve
from policyline.router.request import Attempt


class InFlightCanceller:
    """Ends the wait for an answer when its replica lost its ack and another replica holds one.

    Only requests of which no byte has gone to the client are in here. Each costs one set entry;
    all of them are checked when the gate changes, which is rare.
    """

    def __init__(self) -> None:
        self._scopes: set[CancelScope] = set()

    def scope(self, attempt: Attempt) -> CancelScope:
        """A `with` block that raises `UpstreamAckLost` when the attempt has to end."""
        return CancelScope(attempt, self._scopes)

    def check(self, gate: Gate) -> None:
        """Cancel every attempt whose endpoint lost its ack."""
        for scope in list(self._scopes):
            if has_lost_ack(gate, scope.attempt.call.version, scope.attempt.assignment.endpoint):
                scope.cancel()


class CancelScope:
    """Like `asyncio.timeout`, but for an event instead of a time, at a tenth of its cost.

    Args:
        attempt: that the block waits for.
        scopes: the set that holds this scope while the block runs.
    """

    __slots__ = ("_cancelled", "_scopes", "_task", "attempt")

    def __init__(self, attempt: Attempt, scopes: set[CancelScope]) -> None:
        self.attempt = attempt
        self._scopes = scopes
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the block."""
        self._scopes.discard(self)
        self._cancelled = True
        assert self._task is not None
        self._task.cancel()

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._scopes.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scopes.discard(self)
        if not self._cancelled:
            return
        assert self._task is not None
        cancelled_by_others = self._task.uncancel() > 0
        if isinstance(error, asyncio.CancelledError) and not cancelled_by_others:
            raise UpstreamAckLost("its ack is no longer valid") from error


def has_lost_ack(gate: Gate, version: int, endpoint: Endpoint) -> bool:
    """Whether other endpoints serve the version, and this one does not.

    False for a version that left the window or that nobody else serves: the answer in flight is
    still one of the version that was asked for.
    """
    verdict = gate.judge_version(version)
    return isinstance(verdict, Serve) and all(
        (other.replica, other.incarnation) != (endpoint.replica, endpoint.incarnation)
        for other in verdict.endpoints
    )
