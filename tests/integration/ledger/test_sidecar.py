"""A live sidecar on both databases: signals that never come, a server that comes back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy.engine import Connection

from ledger import Ledger
from ledger.errors import LedgerUnavailable
from ledger.signals import Signal
from ledger.verify import verify
from policyline.engines.simulated.server import SimulatedServer
from storage import DirectoryStorage
from tests.engines import until
from tests.integration.watcher.site import Running, Site
from tests.postgres import PostgresServer, fresh_database, start_private

POLL_S = 1.0
SLACK_S = 2.0
"""For the load itself, on a machine that is busy."""


class DeafSignal:
    """Every signal is lost."""

    def in_transaction(self, connection: Connection) -> None:
        """Nobody hears it."""

    def after_commit(self) -> None:
        """Nobody hears it."""

    def wakes(self, stop: threading.Event) -> Iterator[None]:
        """Never yields."""
        stop.wait()
        yield from ()


class DeafLedger(Ledger):
    """Hears no signal and raises none."""

    @property
    def signal(self) -> Signal:
        return DeafSignal()


def place(root: Path, ledger: Ledger) -> Site:
    (root / "storage").mkdir()
    return Site(root, ledger, DirectoryStorage(root / "storage"))


async def test_without_any_signal_it_takes_one_poll(
    ledger_url: str, tmp_path: Path, double: SimulatedServer
) -> None:
    with DeafLedger(ledger_url) as ledger:
        site = place(tmp_path, ledger)
        async with site.sidecar(double, poll_interval_s=POLL_S):
            for seed in (1, 2, 3):
                await site.publish(seed)
                published = time.monotonic()
                await site.until_acked(seed)
                assert time.monotonic() - published < POLL_S + SLACK_S
        assert verify(ledger).problems == ()


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may stop."""
    yield from start_private()


@pytest.fixture
def own_url(own_server: PostgresServer) -> Iterator[str]:
    """A ledger on it."""
    yield from fresh_database(own_server)


async def says(running: Running, part: str) -> bool:
    """Whether it gives this as the reason why it is not ready."""
    return part in (await running.get("/readyz")).text


async def test_a_sidecar_carries_on_when_the_server_restarts(
    own_server: PostgresServer, own_url: str, tmp_path: Path, double: SimulatedServer
) -> None:
    """Stopped while idle and while it works: each version is loaded and acked once."""
    with Ledger(own_url) as ledger, Ledger(own_url) as observing:
        site = place(tmp_path, ledger)
        async with site.sidecar(double) as running:
            await site.publish_and_wait(1)
            await asyncio.to_thread(own_server.stop)
            with pytest.raises(LedgerUnavailable):
                await asyncio.to_thread(observing.head)
            await until(partial(says, running, "ledger:"))
            assert (await running.get("/healthz")).status_code == 200
            await asyncio.to_thread(own_server.start_again)
            await site.publish_and_wait(2)
            for seed in (3, 4, 5):
                await site.publish(seed)
                await asyncio.to_thread(own_server.restart)
                await site.until_acked(seed)
            loads = list(running.client.loads)
        acks = Counter(e.version for e in observing.events(kinds=["version_acked"]))
        assert acks == dict.fromkeys(range(1, 6), 1)
        assert loads == [f"trl-policy-v{v}" for v in range(1, 6)]
        joins = observing.events(kinds=["replica_joined", "replica_lost"])
        assert [e.kind for e in joins] == ["replica_joined"]
        assert verify(observing).problems == ()
