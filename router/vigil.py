"""Watches requests at replicas of which no byte has gone out: they may still be asked elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from router.call import Passage
from router.errors import UpstreamVoided
from router.gate import Gate, Seat, Serve
from router.keeper import Keeper

_LOOK_S: Final = 60.0
"""The gate's bell is heard at once; this only bounds one wait for it."""


class Vigil:
    """Ends the wait for an answer when its replica may not answer any more, and another may.

    A request costs an entry here; all of them are looked at when the gate has changed, which is
    rare.

    Args:
        keeper: of the gate.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._watched: dict[str, tuple[Passage, asyncio.Timeout]] = {}
        """By the request's id."""

    @asynccontextmanager
    async def over(self, passage: Passage) -> AsyncIterator[None]:
        """Watch a request for the length of a block, which is cancelled when it is to end.

        Raises:
            UpstreamVoided: the seat is gone; ask another.
        """
        request = passage.call.id
        until = asyncio.timeout(None)
        try:
            async with until:
                self._watched[request] = passage, until
                yield
        except TimeoutError as error:
            if not until.expired():
                raise
            raise UpstreamVoided("its ack is no longer in force") from error
        finally:
            self._watched.pop(request, None)

    async def run(self) -> None:
        """Look after each change of the gate, for ever."""
        while True:
            await self._keeper.turned.wait(_LOOK_S)
            if self._keeper.gate is not None:
                self._look(self._keeper.gate)

    def _look(self, gate: Gate) -> None:
        now = asyncio.get_running_loop().time()
        for request, (passage, until) in list(self._watched.items()):
            if is_voided(gate, passage.call.version, passage.ticket.seat):
                del self._watched[request]
                until.reschedule(now)


def is_voided(gate: Gate, version: int, seat: Seat) -> bool:
    """Whether others serve the version, and that life of a replica does not.

    A version that left the window, or that nobody else serves, voids nothing: what is in flight is
    an answer of the version that was asked for.
    """
    verdict = gate.judge_version(version)
    return isinstance(verdict, Serve) and all(
        (s.replica, s.incarnation) != (seat.replica, seat.incarnation) for s in verdict.seats
    )
