"""Keeps the router's view of the ledger: read in threads, kept while the ledger is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from policyline.ledger.errors import LedgerError, LedgerUnavailable
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.store import Ledger
from policyline.router.bell import Bell
from policyline.router.gate import Gate, Look, Mark, Seat, Verdict, absent, prepare
from policyline.router.settings import RouterSettings

log = logging.getLogger(__name__)

_ASKED_MOST: Final = 256
"""Versions beyond the desired ones that a view covers: those that were asked for last."""
_ANSWER_S: Final = 10.0
"""A read of the ledger that takes longer counts as none; a view takes milliseconds."""
_RELISTEN_S: Final = 2.0
"""Before a broken stream of signals is opened again; polls go on meanwhile."""


class Keeper:
    """The last view of one line, prepared as a gate.

    A signal, a poll, or a question that the view cannot answer leads to a new read; one is made at
    a time, and all who ask meanwhile share the next.

    Args:
        settings: of the router.
        ledger: is read.
        changed: rung after each view that says something new.
    """

    def __init__(self, settings: RouterSettings, ledger: Ledger, changed: Bell) -> None:
        self._settings = settings
        self._ledger = ledger
        self._changed = changed
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ledger-view")
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._marks: dict[Mark, float] = {}
        """Contradicted acks, and until when they are distrusted (monotonic)."""
        self._reading: asyncio.Future[None] | None = None
        self._wake = asyncio.Event()
        self._stop = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self.turned = Bell()
        """Rung when the gate has changed, and at nothing else."""
        self.view: LineSnapshot | None = None
        self.gate: Gate | None = None
        self.ledger_up = False
        self.read_at_s = 0.0
        """When the ledger last answered, monotonic."""

    async def start(self) -> None:
        """Read the first view and begin to follow.

        Raises:
            LedgerError: it cannot be read.
        """
        loop = asyncio.get_running_loop()
        self._take(await loop.run_in_executor(self._threads, self._read, ()))
        threading.Thread(
            target=self._listen, args=(loop,), name="ledger-signals", daemon=True
        ).start()
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Read no more."""
        self._stop.set()
        self._ledger.signal.after_commit()  # ends the thread's wait
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def current(self) -> int | None:
        """The version that an alias means."""
        return None if self.gate is None else self.gate.current

    async def answer(self, version: int) -> Verdict:
        """The verdict on a version that the view does not cover; reads the ledger.

        Raises:
            LedgerUnavailable: it cannot be read now.
        """
        self._ask_for(version)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._refresh()
        except TimeoutError as error:
            self._away("it does not answer")
            raise LedgerUnavailable("the ledger does not answer in time") from error
        if not self.ledger_up or self.gate is None:
            raise LedgerUnavailable(f"ledger {self._ledger.shown_url} is away")
        verdict = self.gate.judge_version(version)
        return absent(self.gate, version) if isinstance(verdict, Look) else verdict

    def distrust(self, seat: Seat, version: int) -> None:
        """An engine denied a version that its replica acked: send nothing there for a while."""
        mark = Mark(seat.replica, seat.incarnation, version, seat.acked_seq)
        if mark not in self._marks:
            log.warning(
                "%s says that it has no version %d, which it acked",
                seat.replica,
                version,
                extra={"event": "ack_contradicted", "replica": seat.replica, "version": version},
            )
        self._marks[mark] = time.monotonic() + self._settings.mark_s
        self._prepare()

    def lives(self) -> list[tuple[str, str]]:
        """(replica, incarnation) of those that are joined."""
        rows = () if self.view is None else self.view.replicas.values()
        return [(r.replica, r.incarnation or "") for r in rows if r.state == "joined"]

    async def _follow(self) -> None:
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await self._refresh()
            except TimeoutError:
                self._away("it does not answer")
            except Exception:
                log.exception("the ledger could not be read", extra={"event": "view_failed"})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_interval_s):
                    await self._wake.wait()

    async def _refresh(self) -> None:
        """A read that begins after this call: one that runs already may have come too early."""
        if self._reading is not None:
            await asyncio.shield(self._reading)
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read_once())
        await asyncio.shield(self._reading)

    async def _read_once(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            view = await loop.run_in_executor(self._threads, self._read, tuple(self._asked))
        except LedgerError as error:
            self._away(str(error))
        else:
            self._take(view)
        finally:
            self._reading = None

    def _away(self, cause: str) -> None:
        if self.ledger_up:
            log.warning("ledger away: %s", cause, extra={"event": "ledger_away"})
        self.ledger_up = False

    def _read(self, also: tuple[int, ...]) -> LineSnapshot:
        return self._ledger.view(self._settings.line, also)

    def _take(self, view: LineSnapshot) -> None:
        if self.view is not None and view.ledger_id != self.view.ledger_id:
            log.error("another ledger answers at %s; its view is not taken", self._ledger.shown_url)
            self.ledger_up = False
            return
        if not self.ledger_up:
            log.info("ledger up", extra={"event": "ledger_up"})
        self.ledger_up = True
        self.read_at_s = time.monotonic()
        self.view = view
        self._prepare()

    def _prepare(self) -> None:
        if self.view is None:
            return
        now = time.monotonic()
        self._marks = {mark: until for mark, until in self._marks.items() if until > now}
        former, self.gate = self.gate, prepare(self.view, self._marks)
        if former != self.gate:
            self._changed.ring()
            self.turned.ring()

    def _ask_for(self, version: int) -> None:
        self._asked[version] = None
        self._asked.move_to_end(version)
        if len(self._asked) > _ASKED_MOST:
            self._asked.popitem(last=False)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            try:
                for _ in self._ledger.signal.wakes(self._stop):
                    loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed
                return
            except Exception:
                log.exception("the ledger's signals broke off")
            self._stop.wait(_RELISTEN_S)
