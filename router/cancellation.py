"""Cancels requests at replicas that lost their ack, so that another replica can answer them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from policyline.router.errors import UpstreamAckLost
from policyline.router.gate import Endpoint, Gate, Serve
from policyline.router.request import Attempt


class InFlightCanceller:
    """Ends the wait for an answer when its replica lost its ack and another replica holds one.

    Only requests of which no byte has gone to the client are in here. All of them are checked when
    the gate changes, which is rare.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, Attempt] = {}

    @asynccontextmanager
    async def scope(self, attempt: Attempt) -> AsyncIterator[None]:
        """A block that raises `UpstreamAckLost` when the attempt has to end."""
        try:
            async with asyncio.timeout(None) as timeout:  # it expires when `check` says so
                self._waiting[timeout] = attempt
                try:
                    yield
                finally:
                    del self._waiting[timeout]
        except TimeoutError as error:
            raise UpstreamAckLost("its ack is no longer valid") from error

    def check(self, gate: Gate) -> None:
        """Cancel every attempt whose endpoint lost its ack."""
        now = asyncio.get_running_loop().time()
        for timeout, attempt in self._waiting.items():
            lost = has_lost_ack(gate, attempt.call.version, attempt.assignment.endpoint)
            if lost and not timeout.expired():
                timeout.reschedule(now)


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
