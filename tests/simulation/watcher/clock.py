"""An event loop whose clock is injected: it jumps to the next timer, and nobody ever sleeps.

Blocking work runs in the loop itself, a moment later than it was asked for, so that every run with
the same choices is the same. The two kinds of threads that the watcher starts by itself get their
turns one after another before the clock moves.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable
from typing import Any

BLOCKING_CALL_S = 0.001
"""How long a call in a thread takes, on the injected clock."""
_LOOK_S = 0.0002
"""Real time between two looks at whether a thread has come to its rest."""
LOOKS = 150_000
"""So often, half a minute at least, a thread is looked at before it counts as stuck. Looks and not
time: on a machine that is busy, or stops us for a minute, nobody is stuck."""


class Turns:
    """Threads do what others can see in their turn only, in the order of their starts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._whose: threading.Thread | None = None

    def give(self, thread: threading.Thread | None) -> None:
        """Let a thread go on; None: nobody."""
        with self._changed:
            self._whose = thread
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until it is the turn of the thread that calls."""
        me = threading.current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._whose is me)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`settled(thread)` says whether a living thread has nothing to do before the clock moves."""

    def __init__(self) -> None:
        self.settled: Callable[[threading.Thread], bool] = lambda _thread: True
        self.turns = Turns()
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
        """Give each thread its turn, and wait, in real time, until it has ended or come to rest."""
        for thread in threading.enumerate():  # in the order of their starts
            if thread is threading.current_thread() or self.settled(thread):
                continue
            self.turns.give(thread)
            looks = 0
            while thread.is_alive() and not self.settled(thread):
                if looks == LOOKS:
                    raise TimeoutError(f"thread {thread.name} does not come to rest")
                looks += 1
                thread.join(_LOOK_S)
        self.turns.give(None)


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
