"""Single-flight: who asks for work that already runs waits for it instead of starting it again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    """Work by key, at most one of each key at a time; a result is kept until somebody takes it.

    Work that nobody waits for any more goes on, and its result can be taken later. One event loop.
    """

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Future[T]] = {}

    def start(self, key: K, work: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Start `work`, or return the one that runs or whose result nobody has taken yet."""
        future = self._running.get(key)
        if future is None:
            future = self._running[key] = asyncio.ensure_future(work())
            future.add_done_callback(_retrieve_error)
        return future

    async def take(self, key: K) -> T | None:
        """The result of what was started, waited for; None when there is none, or an error."""
        future = self._running.get(key)
        if future is None:
            return None
        await asyncio.wait([future])
        self._forget(key, future)
        return None if future.exception() is not None else future.result()

    async def join(
        self, key: K, work: Callable[[], Awaitable[T]], *, timeout_s: float | None = None
    ) -> T:
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
                self._forget(key, future)

    async def fresh(
        self, key: K, work: Callable[[], Awaitable[T]], *, timeout_s: float | None = None
    ) -> T:
        """The result of work that begins after this call; all who ask meanwhile share the next.

        For reads: one that runs already may have begun before what the caller must see.

        Raises:
            TimeoutError: the running one or the next takes too long; they go on.
        """
        async with asyncio.timeout(timeout_s):
            running = self._running.get(key)
            if running is not None:
                await asyncio.wait([running])
                self._forget(key, running)
            return await self.join(key, work)

    def _forget(self, key: K, future: asyncio.Future[T]) -> None:
        if self._running.get(key) is future:
            del self._running[key]


def _retrieve_error(future: asyncio.Future[T]) -> None:
    """Nobody may ever take the result; asyncio then complains about an error in it."""
    if not future.cancelled():
        future.exception()
