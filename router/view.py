"""The router's view of the ledger: read in a thread, still used while the ledger cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from policyline.ledger.errors import LedgerError, LedgerUnavailable
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.store import Ledger
from policyline.router.gate import (
    DistrustedAck,
    Endpoint,
    Gate,
    NotInView,
    Verdict,
    absent,
    prepare,
)
from policyline.router.settings import RouterSettings
from policyline.single_flight import SingleFlight

log = logging.getLogger(__name__)

_MAX_EXTRA_VERSIONS: Final = 256
"""Versions outside the desired set that a view covers: the ones that were asked for last."""
_READ_TIMEOUT_S: Final = 10.0
"""A read that takes longer has failed; it normally takes milliseconds."""


class ViewCache:
    """The last view of one line, prepared as a gate.

    A signal, a poll, or a version that the view does not cover causes a read. One read runs at a
    time, and all who ask meanwhile share the next one.

    Args:
        settings: of the router.
        ledger: that is read.
    """

    def __init__(self, settings: RouterSettings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ledger-view")
        self._extra_versions: OrderedDict[int, None] = OrderedDict()
        self._distrusted: dict[DistrustedAck, float] = {}
        """Contradicted acks, and until when they are distrusted (monotonic seconds)."""
        self._reads: SingleFlight[str, None] = SingleFlight()
        self._follower = ledger.follow(poll_s=settings.poll_interval_s)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._view: LineSnapshot | None = None
        self._gate: Gate | None = None
        self.on_gate_change: list[Callable[[Gate], object]] = []
        """Called with each gate that differs from the one before, in the event loop."""
        self.ledger_up = False
        self.read_at_s = 0.0
        """When the ledger last answered, in monotonic seconds."""

    @property
    def view(self) -> LineSnapshot:
        """The last view; `start` reads the first one."""
        assert self._view is not None
        return self._view

    @property
    def gate(self) -> Gate:
        """The last view as a gate; `start` prepares the first one."""
        assert self._gate is not None
        return self._gate

    async def start(self) -> None:
        """Read the first view and begin to follow the ledger.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        loop = asyncio.get_running_loop()
        self._accept(await loop.run_in_executor(self._threads, self._read, ()))
        threading.Thread(
            target=self._listen, args=(loop,), name="ledger-signals", daemon=True
        ).start()
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop reading. The last view can still be used."""
        self._follower.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def judge_uncovered(self, version: int) -> Verdict:
        """The verdict on a version that the view does not cover; reads the ledger.

        Raises:
            LedgerUnavailable: the ledger cannot be read now.
        """
        self._extra_versions[version] = None
        self._extra_versions.move_to_end(version)
        if len(self._extra_versions) > _MAX_EXTRA_VERSIONS:
            self._extra_versions.popitem(last=False)
        await self._refresh()
        if not self.ledger_up:
            raise LedgerUnavailable(f"ledger {self._ledger.shown_url} cannot be reached")
        verdict = self.gate.judge_version(version)
        return absent(self.gate, version) if isinstance(verdict, NotInView) else verdict

    def distrust(self, endpoint: Endpoint, version: int) -> None:
        """Send no request for the version to this endpoint for `mark_s`: its engine lacks it."""
        ack, replica = (endpoint, version), endpoint.replica
        if ack not in self._distrusted:
            log.warning(
                "%s acked version %d, but its engine answers that it has no such model",
                replica,
                version,
                extra={"event": "ack_contradicted", "replica": replica, "version": version},
            )
        self._distrusted[ack] = time.monotonic() + self._settings.mark_s
        self._prepare()

    def joined(self) -> list[str]:
        """Names of the replicas that are joined."""
        return [r.replica for r in self.view.replicas.values() if r.state == "joined"]

    async def _follow(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._refresh()
            except Exception:
                log.exception("the ledger could not be read", extra={"event": "view_failed"})

    async def _refresh(self) -> None:
        """Wait for a read that begins after this call: one under way may have been too early."""
        try:
            await self._reads.fresh("view", self._read_once, timeout_s=_READ_TIMEOUT_S)
        except TimeoutError:
            self._set_unreachable("it does not answer")

    async def _read_once(self) -> None:
        loop = asyncio.get_running_loop()
        also = tuple(self._extra_versions)
        try:
            view = await loop.run_in_executor(self._threads, self._read, also)
        except LedgerError as error:
            self._set_unreachable(str(error))
        else:
            self._accept(view)

    def _set_unreachable(self, cause: str) -> None:
        if self.ledger_up:
            log.warning(
                "the ledger cannot be reached: %s", cause, extra={"event": "ledger_unreachable"}
            )
        self.ledger_up = False

    def _read(self, also: tuple[int, ...]) -> LineSnapshot:
        return self._ledger.view(self._settings.line, also)

    def _accept(self, view: LineSnapshot) -> None:
        if self._view is not None and view.ledger_id != self._view.ledger_id:
            log.error(
                "another ledger answers at %s; its view is not used",
                self._ledger.shown_url,
                extra={"event": "ledger_replaced"},
            )
            self.ledger_up = False
            return
        if not self.ledger_up:
            log.info("the ledger can be reached", extra={"event": "ledger_reachable"})
        self.ledger_up = True
        self.read_at_s = time.monotonic()
        self._view = view
        self._prepare()

    def _prepare(self) -> None:
        now = time.monotonic()
        self._distrusted = {ack: until for ack, until in self._distrusted.items() if until > now}
        former, self._gate = self._gate, prepare(self.view, self._distrusted)
        if former != self._gate:
            for callback in self.on_gate_change:
                callback(self._gate)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            for _ in self._follower:
                loop.call_soon_threadsafe(self._wake.set)
