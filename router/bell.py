"""A bell: whoever waits is woken when something may have changed."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes all who wait; who comes later waits for the next ring. One event loop."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake everybody."""
        future, self._next = self._next, None
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a ring; False when none came in time."""
        if timeout_s <= 0:
            return False
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._next], timeout=timeout_s)
        return bool(done)
