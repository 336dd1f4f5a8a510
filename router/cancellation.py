"""Watches requests at replicas of which no byte has gone out: they may still be asked elsewhere."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Final

from policyline.router.errors import UpstreamVoided
from policyline.router.gate import Gate, Seat, Serve
from policyline.router.request import Passage
from policyline.router.view import Keeper

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
        self._watches: set[Watch] = set()

    def over(self, passage: Passage) -> Watch:
        """Watch a request for the length of a `with` block, which is cancelled when it is to end.

        The block raises `UpstreamVoided` then.
        """
        return Watch(passage, self._watches)

    async def run(self) -> None:
        """Look after each change of the gate, for ever."""
        while True:
            await self._keeper.turned.wait(_LOOK_S)
            if self._keeper.gate is not None:
                self._look(self._keeper.gate)

    def _look(self, gate: Gate) -> None:
        for watch in list(self._watches):
            if is_voided(gate, watch.passage.call.version, watch.passage.ticket.seat):
                watch.void()


class Watch:
    """One request; `asyncio.timeout` for an event instead of a time, at a tenth of its cost.

    Args:
        passage: of the request.
        watches: that this is one of while it lasts.
    """

    __slots__ = ("_task", "_voided", "_watches", "passage")

    def __init__(self, passage: Passage, watches: set[Watch]) -> None:
        self.passage = passage
        self._watches = watches
        self._task: asyncio.Task[Any] | None = None
        self._voided = False

    def void(self) -> None:
        """Cancel the block."""
        self._watches.discard(self)
        self._voided = True
        assert self._task is not None
        self._task.cancel()

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._watches.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watches.discard(self)
        if not self._voided:
            return
        assert self._task is not None
        cancelled_by_others = self._task.uncancel() > 0
        if isinstance(error, asyncio.CancelledError) and not cancelled_by_others:
            raise UpstreamVoided("its ack is no longer in force") from error


def is_voided(gate: Gate, version: int, seat: Seat) -> bool:
    """Whether others serve the version, and that life of a replica does not.

    A version that left the window, or that nobody else serves, voids nothing: what is in flight is
    an answer of the version that was asked for.
    """
    verdict = gate.judge_version(version)
    return isinstance(verdict, Serve) and all(
        (s.replica, s.incarnation) != (seat.replica, seat.incarnation) for s in verdict.seats
    )
