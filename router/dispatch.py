"""Which version a request means, and who gets it: waits until somebody may."""

from __future__ import annotations

import time
from typing import Final

from policyline.ledger.errors import LedgerUnavailable
from policyline.router.affinity.affinity import Affinity
from policyline.router.answers import Refused
from policyline.router.bell import Bell
from policyline.router.gate import (
    POLICY_NOT_READY,
    POLICY_UNKNOWN,
    RUN_UNKNOWN,
    Look,
    Refuse,
    Serve,
    Verdict,
    Wait,
)
from policyline.router.metrics import Metrics
from policyline.router.replicas import Fleet
from policyline.router.request import Call, Passage
from policyline.router.sessions import Sessions
from policyline.router.settings import RouterSettings
from policyline.router.texts import cut
from policyline.router.trainer_backend import Trainer
from policyline.router.view import Keeper

_LOOK_AGAIN_S: Final = 0.5
"""A waiting request looks again at the latest after so long."""
_RETRY_ALL_S: Final = 0.2
"""When every replica has failed a request, before they are asked again."""


class Placing:
    """Finds version and replica, or refuses.

    Args:
        settings: of the router.
        keeper: of the view.
        affinity: chooses.
        fleet: who cannot be reached.
        sessions: of the alias.
        metrics: count choices.
        changed: rung when a wait may be over.
        trainer: knows trainers' names; None: there are none.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        keeper: Keeper,
        affinity: Affinity,
        fleet: Fleet,
        sessions: Sessions,
        metrics: Metrics,
        changed: Bell,
        trainer: Trainer | None,
    ) -> None:
        self._settings = settings
        self._keeper = keeper
        self._affinity = affinity
        self._fleet = fleet
        self._sessions = sessions
        self._metrics = metrics
        self._changed = changed
        self._trainer = trainer

    async def version(self, name: object, run: str | None, session: str, arrived_s: float) -> int:
        """The version that a request names, whatever it calls it.

        Args:
            name: the request's model.
            run: whose trainer's URL was used; None: nobody's.
            session: that the alias is pinned for; empty: none.
            arrived_s: monotonic.

        Raises:
            Refused: it names none.
        """
        if name == self._settings.alias:
            await self._check_run(run)
            current = await self._current(arrived_s + self._settings.ready_wait_s)
            return self._sessions.version(session, current, arrived_s) if session else current
        if run is not None and self._trainer is not None and isinstance(name, str) and name:
            try:
                version = await self._trainer.version(run, name)
            except LedgerUnavailable as error:
                raise _ledger_away(error) from error
            if version is None:
                raise Refused(404, POLICY_UNKNOWN, f"{cut(name)} was not loaded in run {run!r}")
            return version
        assert self._keeper.gate is not None
        match self._keeper.gate.judge(name):
            case Refuse(status, code, message):
                raise Refused(status, code, message)
            case Serve(version=version) | Wait(version=version) | Look(version=version):
                return version

    async def place(self, call: Call) -> Passage:
        """Wait until a replica may be asked, choose it and count the request there.

        Raises:
            Refused: never, or not in time.
        """
        deadline_s = call.arrived_s + self._settings.ready_wait_s
        while True:
            verdict = await self._judge(call.version)
            if isinstance(verdict, Wait):
                await self._wait(deadline_s, verdict.why)
                continue
            if call.failed and all(seat.replica in call.failed for seat in verdict.seats):
                await self._wait(deadline_s, f"{verdict.name}: no replica answers", _RETRY_ALL_S)
                call.failed.clear()
                continue
            seats = [s for s in verdict.seats if s.replica not in call.failed]
            ticket = self._affinity.begin(
                call.version, verdict.digest, call.chain, self._fleet.warm(seats)
            )
            if ticket is not None:
                self._metrics.choices[ticket.kind] += 1
                return Passage(call, verdict, ticket, time.monotonic())
            await self._wait(deadline_s, f"{verdict.name}: no replica has a free slot for it")

    def leave(self, passage: Passage) -> None:
        """The request is no longer at that replica."""
        self._affinity.end(passage.ticket)
        self._changed.ring()

    def contradicted(self, passage: Passage) -> None:
        """The engine denied a version that its replica acked."""
        self._keeper.distrust(passage.ticket.seat, passage.call.version)

    def unreachable(self, passage: Passage) -> None:
        """The replica could not be connected to."""
        self._fleet.cool(passage.ticket.seat)

    async def _check_run(self, run: str | None) -> None:
        """Current belongs to the line: under a name that is no run's, it is somebody else's."""
        if run is None or self._trainer is None:
            return
        try:
            is_known = await self._trainer.knows(run)
        except LedgerUnavailable as error:
            raise _ledger_away(error) from error
        if not is_known:
            raise Refused(404, RUN_UNKNOWN, f"run {run!r} was never opened on this line")

    async def _current(self, deadline_s: float) -> int:
        while (current := self._keeper.current()) is None:
            await self._wait(deadline_s, "nothing is current on this line yet")
        return current

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


def _ledger_away(error: LedgerUnavailable) -> Refused:
    return Refused(503, "ledger_away", str(error), retry_after_s=2)
