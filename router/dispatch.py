"""Finds the version that a request means and a replica for it, and waits where needed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from policyline.router.affinity.affinity import Affinity
from policyline.router.answers import HttpRefused
from policyline.router.gate import (
    POLICY_NOT_READY,
    POLICY_UNKNOWN,
    RUN_UNKNOWN,
    NotInView,
    NotReady,
    Refuse,
    Serve,
    Verdict,
    shorten,
)
from policyline.router.metrics import Metrics
from policyline.router.replicas import ReplicaMonitor
from policyline.router.request import Attempt, Call
from policyline.router.sessions import Sessions
from policyline.router.settings import RouterSettings
from policyline.router.trainer_backend import TrainerBackend
from policyline.router.view import ViewCache

_RECHECK_S: Final = 0.5
"""A waiting request is checked again at least this often."""
_RETRY_ALL_S: Final = 0.2
"""When every replica has failed a request: the pause before all are tried again."""


class Dispatcher:
    """Finds version and replica for a request, or refuses it.

    Args:
        settings: of the router.
        view_cache: holds the gate.
        affinity: chooses the replica.
        monitor: knows which replicas are unreachable.
        sessions: hold the versions that the alias is pinned to.
        metrics: count choices.
        trainer: knows the names that trainers use; None: no trainer is served.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        view_cache: ViewCache,
        affinity: Affinity,
        monitor: ReplicaMonitor,
        sessions: Sessions,
        metrics: Metrics,
        trainer: TrainerBackend | None,
    ) -> None:
        self._settings = settings
        self._view_cache = view_cache
        self._affinity = affinity
        self._monitor = monitor
        self._sessions = sessions
        self._metrics = metrics
        self._trainer = trainer
        self._changed = asyncio.Event()
        """Pulsed when a waiting request may be able to go on."""
        view_cache.on_gate_change.append(lambda _gate: self._wake_waiting())

    async def version(self, name: object, run: str | None, session: str, arrived_s: float) -> int:
        """The version that a request names: by alias, policy name or a trainer's own name.

        Args:
            name: the request's model.
            run: of the trainer whose URL was used; None: not a trainer's URL.
            session: that pins the alias; empty: none.
            arrived_s: monotonic.

        Raises:
            HttpRefused: it names no version.
            LedgerUnavailable: only the ledger knows.
        """
        if name == self._settings.alias:
            await self._check_run(run)
            current = await self._wait_for_current(arrived_s + self._settings.ready_wait_s)
            return self._sessions.version(session, current, arrived_s) if session else current
        if run is not None and self._trainer is not None and isinstance(name, str) and name:
            return await self._trainer_version(self._trainer, run, name)
        match self._view_cache.gate.judge(name):
            case Refuse(status, code, message):
                raise HttpRefused(status, code, message)
            case Serve(version=version) | NotReady(version=version) | NotInView(version=version):
                return version

    async def assign(self, call: Call) -> Attempt:
        """Wait until a replica can take the request, choose one and count the request there.

        Raises:
            HttpRefused: no replica ever can, or none can in time.
            LedgerUnavailable: only the ledger knows.
        """
        deadline_s = call.arrived_s + self._settings.ready_wait_s
        while True:
            verdict = await self._judge(call.version)
            if isinstance(verdict, NotReady):
                await self._wait(deadline_s, verdict.why)
                continue
            untried = [e for e in verdict.endpoints if e.replica not in call.failed]
            if not untried:
                await self._wait(deadline_s, f"{verdict.name}: no replica answers", _RETRY_ALL_S)
                call.failed.clear()
                continue
            assignment = self._affinity.begin(
                call.version, verdict.digest, call.chain, self._monitor.reachable(untried)
            )
            if assignment is not None:
                self._metrics.choices.labels(assignment.kind).inc()
                return Attempt(call, verdict, assignment, time.monotonic())
            await self._wait(deadline_s, f"{verdict.name}: no replica has a free slot for it")

    def release(self, attempt: Attempt) -> None:
        """The request is no longer in flight at that replica."""
        self._affinity.end(attempt.assignment)
        self._wake_waiting()

    def distrust_ack(self, attempt: Attempt) -> None:
        """The engine has no such model, although its replica acked it."""
        self._view_cache.distrust(attempt.assignment.endpoint, attempt.call.version)

    async def _trainer_version(self, trainer: TrainerBackend, run: str, name: str) -> int:
        version = await trainer.version(run, name)
        if version is None:
            message = f"{shorten(name)} was not loaded in run {run!r}"
            raise HttpRefused(404, POLICY_UNKNOWN, message)
        return version

    async def _check_run(self, run: str | None) -> None:
        """The alias means the line's current, so the URL must name one of the line's runs."""
        if run is not None and self._trainer is not None and not await self._trainer.knows(run):
            raise HttpRefused(404, RUN_UNKNOWN, f"run {run!r} was never opened on this line")

    async def _wait_for_current(self, deadline_s: float) -> int:
        while (current := self._view_cache.gate.current) is None:
            await self._wait(deadline_s, "nothing is current on this line yet")
        return current

    async def _judge(self, version: int) -> Serve | NotReady:
        verdict: Verdict = self._view_cache.gate.judge_version(version)
        if isinstance(verdict, NotInView):
            verdict = await self._view_cache.judge_uncovered(version)
        match verdict:
            case Serve() | NotReady():
                return verdict
            case Refuse(status, code, message):
                raise HttpRefused(status, code, message)
            case NotInView():
                raise AssertionError("a new read covers the version")

    async def _wait(self, deadline_s: float, why: str, at_most_s: float = _RECHECK_S) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise HttpRefused(503, POLICY_NOT_READY, why, retry_after_s=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, at_most_s)):
                await self._changed.wait()

    def _wake_waiting(self) -> None:
        """Wake those who wait now; a later one waits for the next call."""
        self._changed.set()
        self._changed.clear()
