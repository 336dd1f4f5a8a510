"""The condition that wakes waiting requests."""

from __future__ import annotations

import asyncio

from policyline.router.dispatch import AsyncCondition


async def test_a_condition_wakes_every_waiter_once() -> None:
    condition = AsyncCondition()
    waiters = [asyncio.create_task(condition.wait(30)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    condition.notify_all()

    assert await asyncio.gather(*waiters) == [True, True, True]
    assert not await condition.wait(0.01)
    assert not await condition.wait(0)
    condition.notify_all()
