"""One place with everything that a sidecar needs, all of it real but the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from policyline.demo.synthetic import write_adapter
from policyline.engines.simulated.server import SimulatedServer
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.events import Event
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.publisher import Publisher
from policyline.storage import DirectoryStorage
from policyline.watcher import Sidecar, SidecarSettings
from policyline.watcher.background import wait_for
from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.client import EngineClient
from tests.engines import until

WITHIN_S = 20.0
TICK_S = 0.1
TIMEOUTS = EngineTimeouts(
    connect_s=1.0, observe_s=2.0, load_s=2.0, unload_s=2.0, score_s=2.0, control_s=2.0
)


class CountingClient(EngineClient):
    """Also remembers what it was asked."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **{"timeouts": TIMEOUTS, **options})
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.resets = 0
        self.scores: list[str] = []

    async def load(self, name: str, path: str) -> None:
        """Count and load."""
        self.loads.append(name)
        await super().load(name, path)

    async def unload(self, name: str) -> None:
        """Count and unload."""
        self.unloads.append(name)
        await super().unload(name)

    async def score(self, model: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Count and score."""
        self.scores.append(model)
        return await super().score(model, token_ids)

    async def reset_prefix_cache(self) -> None:
        """Count and reset."""
        self.resets += 1
        await super().reset_prefix_cache()


@dataclass
class Running:
    """A sidecar at work."""

    sidecar: Sidecar
    task: asyncio.Task[None]
    client: CountingClient
    settings: SidecarSettings

    async def stop(self) -> None:
        """As SIGTERM does."""
        self.sidecar.stop()
        await self.task

    async def kill(self) -> None:
        """As SIGKILL does, as far as others can see."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def get(self, path: str) -> httpx.Response:
        """Ask its status server."""
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://127.0.0.1:{self.sidecar.port}{path}")

    async def has_joined(self) -> bool:
        """Whether it sits in the ledger; raises what ended it before."""
        if self.task.done():
            self.task.result()
        return (
            self.sidecar.port is not None
            and '"generation":null' not in (await self.get("/status")).text
        )

    async def until_status(self, *parts: str) -> None:
        """Wait until /status contains one of these texts."""
        await until(lambda: self._shows(parts))

    async def until_attempts(self, name: str, least: int) -> None:
        """Wait until a version waits after so many failed attempts, or more."""
        counts = range(least, least + 10)
        await self.until_status(*(f"{name} waits after {n} failed attempts" for n in counts))

    async def _shows(self, parts: tuple[str, ...]) -> bool:
        if self.sidecar.port is None:
            return False
        text = (await self.get("/status")).text
        return any(part in text for part in parts)


@dataclass
class Site:
    """Ledger, storage and what happens on them."""

    root: Path
    ledger: Ledger
    storage: DirectoryStorage
    run: RunSettings = field(default_factory=lambda: RunSettings(ready_grace_s=60.0))

    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Every sidecar that was started."""

    async def publish(self, *seeds: int) -> None:
        """Publish one version for each seed, without waiting for acks."""
        for seed in seeds:
            await asyncio.to_thread(self._publish, seed)

    def _publish(self, seed: int) -> None:
        adapter = write_adapter(self.root / "adapters" / str(seed), seed)
        with Publisher(self.ledger, self.storage, run="run", settings=self.run) as publisher:
            publisher.publish(adapter)

    async def publish_and_wait(self, *seeds: int) -> None:
        """Publish, each once its predecessor is current."""
        for seed in seeds:
            await self.publish(seed)
            await self.until(lambda view: view.current is not None and view.candidate is None)

    @asynccontextmanager
    async def sidecar(
        self, engine: SimulatedServer | str, replica: str = "r0", **options: Any
    ) -> AsyncIterator[Running]:
        """A running sidecar, stopped at the end of the block if it still runs.

        Unless `joins=False` is given, it has joined when the block begins.
        """
        joins = options.pop("joins", True)
        given = {
            "poll_interval_s": 0.2,
            "linger_s": 0.0,
            "grace_s": 0.1,
            "heartbeat_s": 0.5,
            "ttl_s": 30.0,
            "listen": "127.0.0.1:0",
            **options,
        }
        client_options = {o: given.pop(o) for o in ("api_key", "timeouts") if o in given}
        given.setdefault("cache", self.root / "cache" / replica)
        settings = SidecarSettings(replica=replica, **given)
        url = engine if isinstance(engine, str) else engine.url
        async with CountingClient(url, **client_options) as client:
            sidecar = Sidecar(settings, self.ledger, self.storage, client)
            task = asyncio.create_task(sidecar.run())
            self.tasks.append(task)
            running = Running(sidecar, task, client, settings)
            try:
                if joins:
                    await until(running.has_joined)
                yield running
            finally:
                sidecar.stop()
                await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition: Callable[[LineSnapshot], bool]) -> LineSnapshot:
        """The first view of the line that fulfils the condition.

        It is asked at each signal of the ledger, and now and then for what gives none.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        follower = self.ledger.follow(poll_s=None)

        def wake_at_signals() -> None:
            for _ in follower:
                loop.call_soon_threadsafe(changed.set)

        thread = threading.Thread(target=wake_at_signals)
        thread.start()
        try:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    changed.clear()
                    self._raise_what_ended_one()
                    view = await asyncio.to_thread(
                        self.ledger.view, DEFAULT_LINE, range(1, self.versions + 1)
                    )
                    if condition(view):
                        return view
                    await wait_for(changed, TICK_S)
        finally:
            follower.close()
            await asyncio.to_thread(thread.join)

    def _raise_what_ended_one(self) -> None:
        """Waiting would be in vain; a sidecar that was stopped or killed is none of these."""
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    @property
    def versions(self) -> int:
        """How many version numbers there are."""
        return len(self.ledger.versions(line=DEFAULT_LINE))

    async def until_acked(self, version: int, *replicas: str) -> LineSnapshot:
        """Wait until the replicas (default r0) hold an ack for the version."""
        wanted = set(replicas or ("r0",))
        return await self.until(lambda view: wanted <= set(view.acked_by(version)))

    async def until_event(self, kind: str, count: int = 1) -> list[Event]:
        """Wait until so many events of a kind are recorded; return them."""
        await self.until(lambda _: len(self.events(kind)) >= count)
        return self.events(kind)

    def events(self, *kinds: str) -> list[Event]:
        """The events of these kinds."""
        return [e for e in self.ledger.events() if e.kind in kinds]

    def reported(self, version: int, replica: str = "r0") -> str | None:
        """What a replica last reported about a version."""
        rows = self.ledger.residency(DEFAULT_LINE)
        return next((r.state for r in rows if (r.version, r.replica) == (version, replica)), None)

    def copies(self, replica: str = "r0") -> set[str]:
        """Names of the local copies."""
        home = self.root / "cache" / replica / self.ledger.ledger_id
        return {p.name.rpartition("-")[0] for p in home.iterdir() if not p.name.startswith(".")}


def names(*versions: int) -> set[str]:
    """Policy names of the default line."""
    return {policy_name(DEFAULT_LINE, v) for v in versions}
