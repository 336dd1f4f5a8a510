"""A live sidecar on both databases: signals that never come, a server that comes back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy.engine import Connection

from policyline.demo.synthetic import write_adapter
from policyline.engines.simulated.child import SimulatedChild
from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import Ledger
from policyline.ledger.db.signals import Signal
from policyline.ledger.db.waker import Waker, is_readable
from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.read.verify import verify
from policyline.publisher import Publisher
from policyline.storage import DirectoryStorage
from tests.engines import until
from tests.integration.ledger.test_pool import connections, until_connections
from tests.integration.watcher.site import Running, Site
from tests.postgres import PostgresServer, fresh_database, start_private

POLL_S = 1.0
WITHIN_S = 40.0
IDLE_S = 3.0
SLACK_S = 2.0
"""For the load itself, on a machine that is busy."""


class DeafSignal:
    """Every signal is lost."""

    def in_transaction(self, connection: Connection) -> None:
        """Nobody hears it."""

    def after_commit(self) -> None:
        """Nobody hears it."""

    def listen(
        self, waker: Waker, *, details: bool = True, timeout_s: float | None = None
    ) -> Iterator[None]:
        """Never yields."""
        while not waker.closed:
            is_readable(timeout_s, waker.fileno())
            waker.clear()
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


@pytest.fixture
def engine() -> Iterator[SimulatedChild]:
    """A double in a process of its own."""
    with SimulatedChild() as child:
        child.wait_healthy(WITHIN_S)
        yield child


def test_a_live_sidecar_costs_postgres_one_connection(
    postgres_url: str, tmp_path: Path, engine: SimulatedChild
) -> None:
    """The command itself: it serves a version, and then holds what an idle daemon holds."""
    storage = DirectoryStorage(tmp_path / "storage")
    storage.root.mkdir()
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    places = ["--ledger", postgres_url, "--storage", str(storage.root)]
    sidecar = [*places, "--vllm", engine.url, "--cache", str(tmp_path), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "policyline", "sidecar", "--replica", "r0", *sidecar]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE) as process,
        Ledger(postgres_url) as ledger,
    ):
        try:
            with Publisher(ledger, storage, run="r1") as publisher:
                publisher.publish(adapter)
            deadline = time.monotonic() + WITHIN_S
            while ledger.view("trl-policy").acked_by(1) != ("r0",):
                assert time.monotonic() < deadline, ledger.view("trl-policy")
            ledger.close()
            idle_until = time.monotonic() + IDLE_S
            until_connections(postgres_url, 1)
            while time.monotonic() < idle_until:
                assert connections(postgres_url) == 1
        finally:
            process.terminate()
            process.wait(WITHIN_S)
    until_connections(postgres_url, 0)
