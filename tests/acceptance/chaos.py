"""A fleet behind a router, steady rollouts, and somebody who kills things."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from policyline.demo.fleet import Fleet, sidecar_child
from policyline.demo.settings import DemoSettings
from policyline.demo.synthetic import write_adapter
from policyline.engines.child import ChildServer
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.names import policy_name
from policyline.publisher import Publisher
from policyline.storage import open_storage
from tests.engines import until

WORKERS = 6
STORAGE_DELAY_S = 1.5
PUBLISH_EVERY_S = 2.0
MAX_TOKENS = 4
RULES = RunSettings(ready_grace_s=1.0)
_CURRENT_WITHIN_S = 60.0


@dataclass
class Seen:
    """What clients saw."""

    scores: dict[int, set[tuple[float, ...]]] = field(default_factory=lambda: defaultdict(set))
    """Version -> the different log-probabilities that it answered the same question with."""
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Answers that no client should have seen."""
    cut: int = 0
    """Requests that were lost with a killed router."""
    replicas: set[str] = field(default_factory=set)


class Chaos:
    """See the module.

    Args:
        settings: of the fleet, which runs, its last replica with a slow storage.
        fleet: the same.
        ledger: of it.
    """

    def __init__(self, settings: DemoSettings, fleet: Fleet, ledger: Ledger) -> None:
        self.seen = Seen()
        self.router = router_child(settings)
        self._settings = settings
        self._fleet = fleet
        self._ledger = ledger
        self._dice = random.Random(0)
        self._names: list[int] = []
        """Versions that were current, newest last."""
        self._router_up = True
        self._ended = False

    async def run(self, rounds: int, storm: Callable[[int], Awaitable[None]]) -> Seen:
        """Publish `rounds` versions, one every two seconds; `storm` is called after each."""
        async with aiohttp.ClientSession() as http:
            mirror = asyncio.create_task(self._mirror())
            await self._publish(1)
            await self._until_healthy()
            workers = [asyncio.create_task(self._ask_for_ever(http, n)) for n in range(WORKERS)]
            for number in range(2, rounds + 2):
                await asyncio.sleep(PUBLISH_EVERY_S)
                await self._publish(number)
                await storm(number)
                if mirror.done():
                    mirror.result()  # it has failed
            await asyncio.sleep(PUBLISH_EVERY_S)
            self._ended = True
            await asyncio.gather(*workers)
            mirror.cancel()
        await asyncio.to_thread(self.router.terminate, 60)
        return self.seen

    async def kill_router(self) -> None:
        """SIGKILL; the next one begins where it was."""
        self._router_up = False
        await asyncio.to_thread(self.router.restart)
        await self._until_healthy()
        self._router_up = True

    async def serves(self, replica: str) -> bool:
        """Whether a replica holds an ack for the current version."""
        view = await asyncio.to_thread(self._ledger.view, self._settings.line)
        return view.current is not None and replica in view.acked_by(view.current)

    async def all_serve(self) -> bool:
        """Whether every replica does."""
        return all([await self.serves(replica) for replica in self._settings.replica_names])

    async def _until_healthy(self) -> None:
        await asyncio.to_thread(self.router.wait_healthy, _CURRENT_WITHIN_S)

    async def _publish(self, number: int) -> None:
        """Publish a version and wait until it is current."""

        def work() -> int:
            storage = open_storage(str(self._settings.storage))
            adapter = write_adapter(self._settings.adapter(number), number)
            run = self._settings.run
            with Publisher(self._ledger, storage, run=run, settings=RULES) as publisher:
                return publisher.publish(adapter).version

        version = await asyncio.to_thread(work)

        async def current() -> bool:
            view = await asyncio.to_thread(self._ledger.view, self._settings.line)
            return view.current is not None and view.current >= version

        await until(current, _CURRENT_WITHIN_S)
        self._names.append(version)

    async def _mirror(self) -> None:
        """The last replica sees each version later than the others, as over a slow mount."""
        source, target = self._settings.storage, slow_storage(self._settings)
        while True:
            fresh = [
                p
                for p in source.glob(f"{self._settings.line}-v*")
                if not (target / p.name).exists()
            ]
            await asyncio.sleep(STORAGE_DELAY_S)
            for path in fresh:
                staged = target / f".{path.name}"
                await asyncio.to_thread(shutil.copytree, path, staged)
                staged.rename(target / path.name)

    async def _ask_for_ever(self, http: aiohttp.ClientSession, worker: int) -> None:
        while not self._ended:
            version = self._dice.choice(self._names[-3:])
            await self._ask(http, version, worker)

    async def _ask(self, http: aiohttp.ClientSession, version: int, worker: int) -> None:
        content = {
            "model": policy_name(self._settings.line, version),
            "prompt": list(range(5, 29)),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 0,
            "user": f"worker-{worker}",
        }
        up = self._router_up
        try:
            async with http.post(f"{self.router.url}/v1/completions", json=content) as answer:
                body = await answer.json()
                if answer.status != 200:
                    self.seen.errors.append(f"{version}: {answer.status} {body}")
                    return
                self._note(version, answer.headers, body)
        except (aiohttp.ClientError, ConnectionError) as error:
            if up and self._router_up:
                self.seen.errors.append(f"{version}: {error!r}")
            self.seen.cut += 1
            await asyncio.sleep(0.05)

    def _note(self, version: int, headers: Any, body: Any) -> None:
        if headers["x-policy-version"] != str(version):
            self.seen.errors.append(f"{version}: answered as {headers['x-policy-version']}")
        scores = body["choices"][0]["logprobs"]["token_logprobs"]
        self.seen.scores[version].add(tuple(round(score, 3) for score in scores))
        self.seen.requests.append(headers["x-request-id"])
        self.seen.replicas.add(headers["x-policy-replica"])


def slow_storage(settings: DemoSettings) -> Path:
    """What the last replica's sidecar reads."""
    return settings.workdir / "slow-storage"


def slow_sidecar(settings: DemoSettings, replica: str, url: str) -> ChildServer:
    """The sidecar of the last replica."""
    child = sidecar_child(settings, replica, url)
    given, wanted = str(settings.storage), str(slow_storage(settings))
    child._command = [wanted if part == given else part for part in child._command]
    return child


def router_child(settings: DemoSettings) -> ChildServer:
    """The router, not started yet."""
    command = [sys.executable, "-m", "policyline", "router", "--listen", "127.0.0.1:{port}"]
    command += ["--ledger", str(settings.ledger), "--line", settings.line]
    command += ["--spool", str(settings.workdir / "spool")]
    return ChildServer(command, log_path=settings.logs / "router.log")
