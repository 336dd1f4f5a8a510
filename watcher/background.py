"""Background tasks: heartbeats, liveness of the fleet, and the wake-ups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from policyline.ledger.errors import LedgerUnavailable, StaleGeneration
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.store import Ledger
from policyline.watcher.core.liveness import (
    CandidateTimer,
    Heartbeats,
    due,
    note_heartbeats,
    silent,
    time_candidate,
)
from policyline.watcher.membership import ReplicaMembership
from policyline.watcher.settings import SidecarSettings
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineUnreachable

log = logging.getLogger(__name__)

_REWATCH_S: Final = 1.0
"""Before the engine's socket is watched again: something between may close idle connections."""


async def beat_for_ever(
    membership: ReplicaMembership, interval_s: float, on_fenced: Callable[[], None]
) -> None:
    """Move the heartbeat; a refusal is for the loop to deal with."""
    counter = 0
    while True:
        counter += 1
        try:
            await membership.beat(counter)
        except StaleGeneration:
            on_fenced()
        except LedgerUnavailable as error:
            log.debug("heartbeat %d was not written: %s", counter, error)
        await asyncio.sleep(interval_s)


class LivenessMonitor:
    """Declares the silent lost, and lets time decide about the candidate.

    Args:
        settings: of the sidecar.
        ledger: is read and appended to.
        now: monotonic clock in seconds.
    """

    def __init__(self, settings: SidecarSettings, ledger: Ledger, now: Callable[[], float]) -> None:
        self._settings = settings
        self._ledger = ledger
        self._now = now
        self._view: LineSnapshot | None = None
        self._changed = asyncio.Event()
        self._heartbeats = Heartbeats()
        self._timer: CandidateTimer | None = None

    def see(self, view: LineSnapshot) -> None:
        """Take a new view of the line."""
        if self._view is None or view.seq != self._view.seq:
            self._changed.set()
        self._view = view

    async def run_for_ever(self) -> None:
        """Declare lost replicas and settle the candidate when due."""
        next_check_s = self._now()
        while True:
            self._changed.clear()
            wake_at_s = next_check_s
            try:
                if self._view is not None and self._now() >= next_check_s:
                    await self._check_heartbeats(self._view)
                if self._view is not None:
                    wake_at_s = await self._check_candidate(self._view, next_check_s)
            except LedgerUnavailable as error:
                log.debug("the observer cannot use the ledger: %s", error)
            if self._now() >= next_check_s:
                next_check_s = wake_at_s = self._now() + self._settings.heartbeat_s
            await wait_for(self._changed, wake_at_s - self._now())

    async def _check_heartbeats(self, view: LineSnapshot) -> None:
        settings = self._settings
        beats = await asyncio.to_thread(self._ledger.heartbeats, settings.line)
        now = self._now()
        self._heartbeats = note_heartbeats(self._heartbeats, beats, now, gap_s=settings.ttl_s / 2)
        lost = silent(self._heartbeats, view, now, me=settings.replica, ttl_s=settings.ttl_s)
        for replica, heartbeat in lost.items():
            reason = f"heartbeat stood at {heartbeat.counter} for {settings.ttl_s:g} s"
            declared = await asyncio.to_thread(
                self._ledger.declare_lost,
                settings.line,
                replica,
                generation=heartbeat.generation,
                counter=heartbeat.counter,
                reason=reason,
            )
            if declared:
                log.warning(
                    "replica %s is lost: %s",
                    replica,
                    reason,
                    extra={"event": "replica_lost", "replica": replica},
                )

    async def _check_candidate(self, view: LineSnapshot, latest_s: float) -> float:
        """Settle the candidate if its time has come; return when to check again."""
        self._timer = time_candidate(self._timer, view, self._now())
        elapsed, again_s = due(self._timer, view, self._now())
        if self._timer is not None and elapsed is not None:
            await asyncio.to_thread(
                self._ledger.settle, self._settings.line, self._timer.candidate, elapsed
            )
        return latest_s if again_s is None else min(latest_s, again_s)


async def watch_engine(engine: EngineClient, seen: asyncio.Event, wake: Callable[[], None]) -> None:
    """Wake when the engine closes its socket; watch again once it was seen alive."""
    while True:
        seen.clear()
        try:
            await engine.wait_closed()
        except EngineUnreachable as error:
            log.debug("the engine's socket cannot be watched: %s", error)
        wake()
        if await engine.give_up_if_dead():
            log.debug("nobody listens at %s any more", engine.base_url)
        await asyncio.sleep(_REWATCH_S)
        await seen.wait()


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for the event, at most so many seconds."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        return
