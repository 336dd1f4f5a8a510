"""An event loop whose clock is injected: it jumps to the next timer, and nobody ever sleeps.

Blocking work runs in the loop itself, a moment later than it was asked for, so that every run with
the same choices is the same. The two kinds of threads that the watcher starts by itself are waited
for before the clock moves.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

BLOCKING_CALL_S = 0.001
"""How long a call in a thread takes, on the injected clock."""
THREADS_WITHIN_S = 20.0
"""Real time in which a thread must come to its end or to its rest."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`settled(thread)` says whether a living thread has nothing to do before the clock moves."""

    def __init__(self) -> None:
        self.settled: Callable[[threading.Thread], bool] = lambda _thread: True
        self.gate = threading.Event()
        """Open while the loop waits for threads; they deliver nothing in between."""
        self._now_s = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds

    def run_in_executor(  # type: ignore[override] # every executor is this loop
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            # as in a thread: it is done also when nobody waits for it any more
            result, failure = None, None
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - delivered to who waits
                failure = error
            if future.done():
                return
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

        self.call_later(BLOCKING_CALL_S, work)
        return future

    def await_threads(self) -> None:
        """Wait, in real time, until every thread has ended or come to rest."""
        deadline = time.monotonic() + THREADS_WITHIN_S
        self.gate.set()
        for thread in threading.enumerate():
            if thread is threading.current_thread():
                continue
            while thread.is_alive() and not self.settled(thread):
                thread.join(0.0002)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"thread {thread.name} does not come to rest")
        self.gate.clear()


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.await_threads()
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise RuntimeError("the simulation stands still: no timer and nothing to do")
        self._loop.jump(timeout)
        return events
