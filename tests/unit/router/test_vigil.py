"""Which requests lose their replica, and who ended them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policyline.router.cancellation import Watch, is_voided
from policyline.router.errors import UpstreamVoided
from policyline.router.gate import Seat, prepare
from tests.unit.router.views import acked, line_view, replica_row

HERE = Seat("r0", "1", "http://r0", 6, 100)
PASSAGE: Any = None
"""A watch only keeps it."""


@pytest.mark.parametrize(
    ("replicas", "version", "voided"),
    [
        ({"r0": "1", "r1": "1"}, 3, False),
        ({"r1": "1"}, 3, True),
        ({"r0": "2", "r1": "1"}, 3, True),
        ({}, 3, False),
        ({"r1": "1"}, 1, False),
    ],
)
def test_a_seat_is_voided_where_another_serves_the_version(
    replicas: dict[str, str], version: int, voided: bool
) -> None:
    rows = tuple(replica_row(name, incarnation) for name, incarnation in replicas.items())
    said = tuple(acked(name, 3, incarnation) for name, incarnation in replicas.items())

    gate = prepare(line_view(replicas=rows, residency=said))

    assert is_voided(gate, version, HERE) is voided


@pytest.mark.parametrize("client_leaves", [False, True])
async def test_a_client_that_leaves_ends_more_than_the_wait(client_leaves: bool) -> None:
    watches: set[Watch] = set()

    async def waits() -> None:
        with Watch(PASSAGE, watches):
            await asyncio.sleep(60)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    (watch,) = watches
    watch.void()
    if client_leaves:
        task.cancel()

    with pytest.raises(asyncio.CancelledError if client_leaves else UpstreamVoided):
        await task
    assert not watches
    assert task.cancelled() == client_leaves
