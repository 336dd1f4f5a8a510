"""Work in daemon threads, once for all who ask for it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import pytest

from policyline.single_flight import SingleFlight
from policyline.watcher.threads import in_daemon_thread


def in_thread(work: Callable[[], int]) -> Callable[[], Awaitable[int]]:
    return lambda: in_daemon_thread(work, "test")


async def test_who_asks_again_waits_for_the_same() -> None:
    go, runs = threading.Event(), []
    fetches: SingleFlight[int, int] = SingleFlight()

    def work() -> int:
        runs.append(1)
        go.wait(10)
        return 42

    with pytest.raises(TimeoutError):
        await fetches.join(1, in_thread(work), timeout_s=0.01)
    go.set()

    assert await fetches.join(1, in_thread(work), timeout_s=10) == 42
    assert len(runs) == 1
    assert await fetches.join(1, in_thread(work), timeout_s=10) == 42
    assert len(runs) == 2


async def test_an_error_reaches_who_waits() -> None:
    def fail() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await SingleFlight[int, int]().join(1, in_thread(fail), timeout_s=10)


async def test_a_result_can_be_taken_once_and_an_error_never() -> None:
    fetches: SingleFlight[int, int] = SingleFlight()
    assert await fetches.take(1) is None
    fetches.start(1, in_thread(lambda: 7))
    assert await fetches.take(1) == 7
    assert await fetches.take(1) is None

    fetches.start(2, in_thread(lambda: 1 // 0))
    assert await fetches.take(2) is None
