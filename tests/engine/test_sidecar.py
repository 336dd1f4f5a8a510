"""A sidecar next to a real vLLM that decodes, runs out of slots, evicts and is killed."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from policyline.engines.vllm import VllmServer
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.publisher import Publisher
from policyline.storage import DirectoryStorage
from policyline.watcher import Sidecar, SidecarSettings
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterMissing
from tests.conftest import ENGINE_TIMEOUT_S, VLLM, healthy, unload_all
from tests.engines import LONG, PROMPT, decoding, until

pytestmark = pytest.mark.engine

MAX_STALENESS = VLLM.max_loras - 2
"""Current, candidate and the window take every slot."""
WITHIN_S = 120.0
LONG_PROMPT = tuple(5 + n % 400 for n in range(300))
"""Two full blocks of the CPU build's prefix cache (128 tokens each), and more."""
HITS = re.compile(r"^vllm:prefix_cache_hits_total\S* (\S+)$", re.MULTILINE)


class Client(EngineClient):
    """Remembers what was loaded, in order."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.loads: list[str] = []

    async def load(self, name: str, path: str) -> None:
        self.loads.append(name)
        await super().load(name, path)


@dataclass
class Place:
    """Ledger and storage; versions go on over all tests of this file."""

    root: Path
    ledger: Ledger
    storage: DirectoryStorage
    adapters: tuple[Path, ...]
    published: int = 0
    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """What each version answered when it was fresh."""

    def _publish(self) -> int:
        adapter = self.adapters[self.published % len(self.adapters)]
        self.published += 1
        run = RunSettings(max_staleness=MAX_STALENESS)
        with Publisher(self.ledger, self.storage, run="engine", settings=run) as publisher:
            return publisher.publish(adapter).version

    async def serve_next(self, client: EngineClient) -> str:
        """Publish one more version; return its name once it is current."""
        version = await asyncio.to_thread(self._publish)

        async def current() -> bool:
            view = self.ledger.view(DEFAULT_LINE)
            return view.current == version and view.acked_by(version) == ("r0",)

        await until(current, WITHIN_S)
        name = policy_name(DEFAULT_LINE, version)
        self.scores[name] = await client.score(name, PROMPT)
        return name

    def window(self) -> list[str]:
        """Names in the desired set, as the ledger orders them."""
        return [d.name for d in self.ledger.view(DEFAULT_LINE).desired]

    @asynccontextmanager
    async def sidecar(self, url: str) -> AsyncIterator[Client]:
        """A sidecar at work, and its client."""
        settings = SidecarSettings(
            replica="r0",
            cache=self.root / "cache",
            listen="127.0.0.1:0",
            poll_interval_s=1.0,
            linger_s=0.0,
            grace_s=0.5,
        )
        async with Client(url) as client:
            sidecar = Sidecar(settings, self.ledger, self.storage, client)
            task = asyncio.create_task(sidecar.run())
            try:
                yield client
            finally:
                sidecar.stop()
                await task


@pytest.fixture(scope="module")
def vllm_server(vllm_pair: tuple[VllmServer, VllmServer]) -> Iterator[VllmServer]:
    """The server that all share; adapters stay on it from one test of this file to the next."""
    (server,) = healthy(vllm_pair[:1])
    yield server
    unload_all(server)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, adapters: tuple[Path, ...]) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("sidecar")
    (root / "storage").mkdir()
    url = str(root / "ledger.db")
    upgrade_url(url)
    with Ledger(url) as ledger:
        yield Place(root, ledger, DirectoryStorage(root / "storage"), adapters)


async def names(client: EngineClient) -> set[str]:
    return {adapter.name for adapter in (await client.models()).adapters}


async def test_more_versions_than_slots(vllm_server: VllmServer, place: Place) -> None:
    async with place.sidecar(vllm_server.url) as client:
        for _ in range(2 * (MAX_STALENESS + 2)):
            await place.serve_next(client)
            window = place.window()
            for name in window:
                assert await client.score(name, PROMPT) == place.scores[name]
        assert len(window) == MAX_STALENESS + 1

        async def only_the_window() -> bool:
            return await names(client) == set(window)

        await until(only_the_window, WITHIN_S)
    fresh = list(place.scores.values())
    for one, other in itertools.pairwise(fresh):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1


async def test_a_load_changes_nothing_for_what_is_decoding(
    vllm_server: VllmServer, place: Place
) -> None:
    async with place.sidecar(vllm_server.url) as client:
        name = await place.serve_next(client)
        quiet = await client.complete(name, PROMPT, **LONG)
        async with decoding(client, name) as state:
            for _ in range(MAX_STALENESS):
                await place.serve_next(client)

    assert state.errors == []
    assert state.agree_with(quiet)


async def test_requests_in_flight_survive_the_eviction(
    vllm_server: VllmServer, place: Place
) -> None:
    async with place.sidecar(vllm_server.url) as client:
        name = await place.serve_next(client)
        quiet = await client.complete(name, PROMPT, **LONG)
        async with decoding(client, name) as state:
            for _ in range(MAX_STALENESS + 1):
                await place.serve_next(client)

            async def gone() -> bool:
                return name not in await names(client)

            await until(gone, WITHIN_S)
            finished = len(state.results)
            assert name in ((await client.snapshot()).busy or ())

    assert len(state.results) > finished
    assert state.agree_with(quiet)
    assert {type(error) for error in state.errors} <= {AdapterMissing}


async def test_no_prefix_of_one_version_serves_another(
    vllm_server: VllmServer, place: Place
) -> None:
    async def hits() -> float:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as raw:
            text = (await raw.get(f"{vllm_server.url}/metrics")).text
        return sum(
            map(float, re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE))
        )

    async def ask(name: str) -> float:
        before = await hits()
        await client.complete(name, LONG_PROMPT, 1, temperature=0)
        return await hits() - before

    async with place.sidecar(vllm_server.url) as client:
        first = await place.serve_next(client)
        second = await place.serve_next(client)
        assert await ask(first) == 0
        assert await ask(first) > 0
        assert await ask(second) == 0
        assert await ask(second) > 0


# anyio 4 leaves a connection that was just opened to the collector when the call is cancelled
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_kill_9_and_a_restart_on_the_same_url(vllm_server: VllmServer, place: Place) -> None:
    async with place.sidecar(vllm_server.url) as client:
        await place.serve_next(client)
        window = place.window()
        before = place.ledger.view(DEFAULT_LINE).replicas["r0"].incarnation
        client.loads.clear()

        vllm_server.kill()

        async def void() -> bool:
            view = place.ledger.view(DEFAULT_LINE)
            return not any(view.acked_by(d.version) for d in view.desired)

        await until(void, WITHIN_S)
        vllm_server.start()
        await asyncio.to_thread(vllm_server.wait_healthy, ENGINE_TIMEOUT_S)

        async def served() -> bool:
            view = place.ledger.view(DEFAULT_LINE)
            return all(view.acked_by(d.version) == ("r0",) for d in view.desired)

        await until(served, WITHIN_S)
        assert place.ledger.view(DEFAULT_LINE).replicas["r0"].incarnation not in {before, None}
        assert list(dict.fromkeys(client.loads)) == window
        for name in window:
            assert await client.score(name, PROMPT) == place.scores[name]
