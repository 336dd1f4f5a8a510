"""Blocking work in daemon threads: a read of a dead mount never returns and must not hold us."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` in a thread that ends with the process, finished or not."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type] # None only where T allows it

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - delivered to who waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Flights(Generic[K, T]):
    """Work by key, each in one thread: who asks again while it still runs waits for the same."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[K, asyncio.Future[T]] = {}

    def start(self, key: K, work: Callable[[], T]) -> asyncio.Future[T]:
        """Start `work`, or return the one that runs or whose result nobody has taken yet."""
        future = self._running.get(key)
        if future is None:
            future = self._running[key] = in_daemon_thread(work, f"{self._name}-{key}")
            future.add_done_callback(_retrieve_error)
        return future

    async def take(self, key: K) -> T | None:
        """The result of what was started, waited for; None when there is none, or an error."""
        future = self._running.get(key)
        if future is None:
            return None
        await asyncio.wait([future])
        self._running.pop(key, None)
        return None if future.exception() is not None else future.result()

    async def join(self, key: K, work: Callable[[], T], *, timeout_s: float) -> T:
        """Start `work`, or wait for the one that was started, and take its result.

        Raises:
            TimeoutError: it goes on; ask again later.
        """
        future = self.start(key, work)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        finally:
            if future.done():
                self._running.pop(key, None)


def _retrieve_error(future: asyncio.Future[T]) -> None:
    """Nobody may ever take the result; asyncio then complains about an error in it."""
    if not future.cancelled():
        future.exception()
