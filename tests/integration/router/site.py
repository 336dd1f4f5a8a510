"""A small fleet without sidecars: ledger, storage, doubles, routers; the test is the watcher."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from policyline.demo.synthetic import write_adapter
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import EngineFacts, Ledger, Membership, RunSettings
from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.events import Event
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.ledger.rollouts import RolloutFilter, RolloutRow
from policyline.ledger.rows import RunRow
from policyline.publisher import Publisher
from policyline.router import Router, RouterSettings, create_app
from policyline.storage import DirectoryStorage
from tests.engines import until

PROMPT = list(range(5, 45))
LONG = ServiceOptions(EngineOptions(block_size=16), step_delay_s=0.02)
"""A double whose requests take a while: 20 ms a token."""
ENDLESS = ServiceOptions(EngineOptions(), step_delay_s=0.2)
"""200 tokens take longer than any wait in the tests."""


class UnreliableLedger(Ledger):
    """A ledger that can be made unreachable for reads of views and records of rollouts."""

    unreachable = False
    failure: Exception | None = None
    """Raised by every read of a view: a bug."""
    replaced = False
    """Another ledger answers at this URL."""
    hangs: threading.Event | None = None
    """Every read of a view waits for it."""
    reply_lost = 0
    """So many batches more are recorded without saying so."""

    def view(
        self, line: str, also: Collection[int] = (), *, replica: str | None = None
    ) -> LineSnapshot:
        self._check()
        if self.hangs is not None:
            self.hangs.wait(30)
        if self.failure is not None:
            raise self.failure
        view = super().view(line, also, replica=replica)
        return dataclasses.replace(view, ledger_id="another") if self.replaced else view

    def events(self, *args: Any, **options: Any) -> Iterator[Event]:
        self._check()
        return super().events(*args, **options)

    def run(self, run: str) -> RunRow:
        self._check()
        return super().run(run)

    def record_rollouts(self, *args: Any, **options: Any) -> Event | None:
        self._check()
        event = super().record_rollouts(*args, **options)
        if self.reply_lost > 0:
            self.reply_lost -= 1
            raise LedgerUnavailable("the reply was lost")
        return event

    def _check(self) -> None:
        if self.unreachable:
            raise LedgerUnavailable("the ledger cannot be reached")


@dataclass
class Reply:
    """An answer, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def error(self) -> str:
        kind: str = self.content["error"]["type"]
        return kind

    @property
    def replica(self) -> str:
        return self.headers["x-policy-replica"]


@dataclass
class Client:
    """Asks one router."""

    url: str
    http: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, content: Any, **headers: str) -> Reply:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(
            self.url + path, json=content, headers={**self.headers, **names}
        ) as answer:
            return await _reply(answer)

    async def send(self, path: str, body: bytes, **headers: str) -> Reply:
        """A body as it is."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(self.url + path, data=body, headers=names) as answer:
            return await _reply(answer)

    async def raw(self, *lines: bytes, body: bytes = b"") -> bytes:
        """All that comes back for a request to /v1/completions with these header lines as they are.

        Two are added: that the connection is closed, and the length.
        """
        port = int(self.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ends = (b"connection: close", b"content-length: %d" % len(body))
        head = (b"POST /v1/completions HTTP/1.1", *lines, *ends, b"", body)
        writer.write(b"\r\n".join(head))
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def get(self, path: str) -> Reply:
        async with self.http.get(self.url + path, headers=self.headers) as answer:
            return await _reply(answer)

    async def until_health(self, status: int) -> Reply:
        """The first /health with this status."""
        found: list[Reply] = []

        async def holds() -> bool:
            found.append(await self.get("/health"))
            return found[-1].status == status

        await until(holds)
        return found[-1]

    async def complete(self, version: int | str, *, prefix: str = "", **content: Any) -> Reply:
        name = policy_name(DEFAULT_LINE, version) if isinstance(version, int) else version
        headers = content.pop("headers", {})
        body = {"model": name, "prompt": PROMPT, "max_tokens": 3, "temperature": 0, **content}
        return await self.post(f"{prefix}/v1/completions", body, **headers)


async def stream(client: Client, content: dict[str, Any], path: str = "/v1/completions") -> Any:
    """Start a streamed completion; use the result in `async with`."""
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **content}
    return client.http.post(client.url + path, json=body)


async def _reply(answer: aiohttp.ClientResponse) -> Reply:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return Reply(answer.status, headers, await answer.read())


@asynccontextmanager
async def scripted_replica(answers: Mapping[str, tuple[int, bytes]]) -> AsyncIterator[str]:
    """An HTTP server that gives these answers by path, and 404 elsewhere; its URL."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        status, body = answers.get(request.path, (404, b"not found"))
        return web.Response(status=status, body=body, content_type="application/json")

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Site:
    """See the module."""

    def __init__(self, root: Path, ledger: UnreliableLedger, stack: AsyncExitStack) -> None:
        self.root = root
        self.ledger = ledger
        self.storage = DirectoryStorage(root / "storage")
        self.doubles: dict[str, SimulatedServer] = {}
        self.members: dict[str, Membership] = {}
        self.incarnations: dict[str, int] = {}
        self._stack = stack

    async def add(
        self,
        *replicas: str,
        options: ServiceOptions | None = None,
        slots: int = 6,
        url: str | None = None,
    ) -> None:
        """Start doubles and have them join."""
        for replica in replicas:
            double = await self._stack.enter_async_context(SimulatedServer(options))
            self.doubles[replica] = double
            self.incarnations[replica] = 1
            await self._join(replica, slots=slots, url=url)

    async def _join(self, replica: str, *, slots: int = 6, url: str | None = None) -> None:
        facts = EngineFacts(str(self.incarnations[replica]), "b", slots)
        self.members[replica] = await asyncio.to_thread(
            self.ledger.join, DEFAULT_LINE, replica, facts, url=url or self.doubles[replica].url
        )

    async def restart(self, replica: str) -> None:
        """A new incarnation of the engine, which is appended to the ledger."""
        self.incarnations[replica] += 1
        await self.doubles[replica].restart()
        facts = EngineFacts(str(self.incarnations[replica]), "b", 6)
        await asyncio.to_thread(self.ledger.change_incarnation, self.members[replica], facts)

    async def publish(self, seed: int, *, run: str = "run", **settings: Any) -> int:
        """Publish a version; nobody serves it yet."""
        adapter = write_adapter(self.root / "adapters" / f"{run}-{seed}", seed)
        rules = RunSettings(**{"ready_grace_s": 0.0, "max_staleness": 2, **settings})

        def work() -> int:
            with Publisher(self.ledger, self.storage, run=run, settings=rules) as publisher:
                return publisher.publish(adapter).version

        return await asyncio.to_thread(work)

    async def serve(self, version: int, *replicas: str) -> None:
        """Load and ack, as watchers do; default: all replicas."""
        for replica in replicas or tuple(self.doubles):
            name = policy_name(DEFAULT_LINE, version)
            service = self.doubles[replica].service
            if name not in service.registry:
                await service.load(name, self.storage.locate(name))
            row = self.ledger.version(DEFAULT_LINE, version)
            await asyncio.to_thread(
                self.ledger.ack,
                self.members[replica],
                version,
                digest=row.digest or "",
                incarnation=str(self.incarnations[replica]),
                build="b",
                probe=(-1.0,),
            )

    async def publish_and_serve(self, seed: int, **settings: Any) -> int:
        version = await self.publish(seed, **settings)
        await self.serve(version)
        return version

    @asynccontextmanager
    async def following(self, *, rejects: bool = False) -> AsyncIterator[None]:
        """Serve, or reject, whatever is published in the block, as sidecars do."""
        task = asyncio.create_task(self._follow(rejects=rejects))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, *, rejects: bool) -> None:
        while True:
            view = await asyncio.to_thread(Ledger.view, self.ledger, DEFAULT_LINE)
            for desired in view.desired:
                for replica in self.doubles:
                    if replica in view.acked_by(desired.version):
                        continue
                    if not rejects:
                        await self.serve(desired.version, replica)
                    elif desired.role == "candidate":
                        await asyncio.to_thread(
                            self.ledger.load_failed,
                            self.members[replica],
                            desired.version,
                            digest=desired.digest,
                            reason="no good",
                            permanent=True,
                        )
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def router(self, name: str = "router", **options: Any) -> AsyncIterator[Client]:
        """A router at a free port, and a client of it."""
        async with self.running(name, **options) as (router, client):
            del router
            yield client

    @asynccontextmanager
    async def running(
        self, name: str = "router", **options: Any
    ) -> AsyncIterator[tuple[Router, Client]]:
        """The same, with the router's object."""
        parts = {
            key: options.pop(key)
            for key in ("upstream_key", "api_key", "trainer")
            if key in options
        }
        given = {"ready_wait_s": 5.0, "ship_interval_s": 0.05, "drain_timeout_s": 5.0, **options}
        settings = RouterSettings(spool=self.root / name, **given)
        async with create_app(settings, self.ledger, **parts) as router:
            port = await router.listen("127.0.0.1", 0)
            async with aiohttp.ClientSession() as http:
                yield router, Client(f"http://127.0.0.1:{port}", http)

    def rollouts(self) -> list[RolloutRow]:
        return list(self.ledger.rollouts(RolloutFilter(line=DEFAULT_LINE)))

    async def until_recorded(self, count: int) -> list[RolloutRow]:
        """Wait until the ledger has so many rollouts."""
        await self.until(lambda: len(self.rollouts()) >= count)
        return self.rollouts()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is asked in a thread."""

        async def holds() -> bool:
            return await asyncio.to_thread(condition)

        await until(holds)
