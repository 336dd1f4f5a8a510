"""Which requests in flight are cancelled, and by whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from policyline.router.cancellation import InFlightCanceller, has_lost_ack
from policyline.router.errors import UpstreamAckLost
from policyline.router.gate import Endpoint, prepare
from tests.unit.router.views import acked, line_view, replica_row

HERE = Endpoint("r0", "1", "http://r0", 6, 100)


@pytest.mark.parametrize(
    ("replicas", "version", "ack_lost"),
    [
        ({"r0": "1", "r1": "1"}, 3, False),
        ({"r1": "1"}, 3, True),
        ({"r0": "2", "r1": "1"}, 3, True),
        ({}, 3, False),
        ({"r1": "1"}, 1, False),
    ],
)
def test_an_ack_is_lost_only_where_another_endpoint_serves_the_version(
    replicas: dict[str, str], version: int, ack_lost: bool
) -> None:
    rows = tuple(replica_row(name, incarnation) for name, incarnation in replicas.items())
    residency = tuple(acked(name, 3, incarnation) for name, incarnation in replicas.items())

    gate = prepare(line_view(replicas=rows, residency=residency))

    assert has_lost_ack(gate, version, HERE) is ack_lost


@pytest.mark.parametrize("client_disconnects", [False, True])
async def test_a_disconnect_is_not_taken_for_a_lost_ack(client_disconnects: bool) -> None:
    canceller = InFlightCanceller()
    attempt: Any = SimpleNamespace(
        call=SimpleNamespace(version=3), assignment=SimpleNamespace(endpoint=HERE)
    )
    rows, residency = (replica_row("r0"), replica_row("r1")), (acked("r1", 3),)

    async def wait() -> None:
        async with canceller.scope(attempt):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    gate = prepare(line_view(replicas=rows, residency=residency))
    canceller.check(gate)
    await asyncio.sleep(0)
    canceller.check(gate)  # finds it cancelled, but not ended
    if client_disconnects:
        task.cancel()

    with pytest.raises(asyncio.CancelledError if client_disconnects else UpstreamAckLost):
        await task
    assert not canceller._waiting
    assert task.cancelled() == client_disconnects
