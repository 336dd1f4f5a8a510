"""Single-flight: who asks again shares what runs; a fresh answer begins after the question."""

from __future__ import annotations

import asyncio

import pytest

from policyline.single_flight import SingleFlight


class Work:
    """Counts its runs; each ends when it is released."""

    def __init__(self) -> None:
        self.runs = 0
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.runs += 1
        number = self.runs
        await self.go.wait()
        return number


async def test_who_joins_shares_the_running_one_and_a_timeout_does_not_end_it() -> None:
    flights, work = SingleFlight[str, int](), Work()
    with pytest.raises(TimeoutError):
        await flights.join("k", work, timeout_s=0.01)
    work.go.set()
    assert await flights.join("k", work, timeout_s=10) == 1
    assert await flights.join("k", work, timeout_s=10) == 2


async def test_a_fresh_answer_begins_after_the_question_and_is_shared() -> None:
    flights, work = SingleFlight[str, int](), Work()
    running = flights.start("k", work)
    await asyncio.sleep(0)
    fresh = [asyncio.ensure_future(flights.fresh("k", work)) for _ in range(3)]
    await asyncio.sleep(0)
    work.go.set()
    assert await running == 1
    assert await asyncio.gather(*fresh) == [2, 2, 2]


async def test_keys_are_apart() -> None:
    flights, work = SingleFlight[str, int](), Work()
    work.go.set()
    both = await asyncio.gather(flights.join("a", work), flights.join("b", work))
    assert list(both) == [1, 2]


async def test_an_error_reaches_who_waits_and_the_next_starts_again() -> None:
    flights, work = SingleFlight[str, int](), Work()

    async def fail() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await flights.join("k", fail)
    work.go.set()
    assert await flights.join("k", work) == 1


async def test_a_result_can_be_taken_once_and_an_error_never() -> None:
    flights, work = SingleFlight[str, int](), Work()
    work.go.set()
    assert await flights.take("k") is None
    flights.start("k", work)
    assert await flights.take("k") == 1
    assert await flights.take("k") is None

    async def fail() -> int:
        raise KeyError("x")

    flights.start("k", fail)
    assert await flights.take("k") is None
