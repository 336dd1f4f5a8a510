"""The wake-up of waiting requests."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from policyline.router.answers import HttpRefused
from policyline.router.dispatch import Dispatcher
from policyline.router.settings import RouterSettings


async def test_a_changed_gate_wakes_every_waiter_once() -> None:
    parts: Any = SimpleNamespace(on_gate_change=[])
    dispatcher = Dispatcher(
        RouterSettings(),
        view_cache=parts,
        affinity=parts,
        monitor=parts,
        sessions=parts,
        metrics=parts,
        trainer=None,
    )
    (changed,) = parts.on_gate_change
    deadline_s = time.monotonic() + 60
    waiters = [
        asyncio.create_task(dispatcher._wait(deadline_s, "no ack", at_most_s=60)) for _ in range(3)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    changed(None)

    async with asyncio.timeout(30):
        await asyncio.gather(*waiters)
    began_s = time.monotonic()
    await dispatcher._wait(deadline_s, "no ack", at_most_s=0.01)
    assert time.monotonic() - began_s >= 0.01
    with pytest.raises(HttpRefused, match="no ack"):
        await dispatcher._wait(time.monotonic(), "no ack")
    changed(None)
