"""A client that keeps generating under named versions, and trusts the ledger alone for where."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from policyline.demo.fleet import PROMPT
from policyline.ledger import Ledger
from policyline.ledger.names import policy_name
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError

WORKERS = 2
"""Requests in flight; two cores carry no more next to two engines."""
MAX_TOKENS = 8
_PAUSE_S = 0.02
"""Between two reads of a ledger in which nothing is acked yet, and between two requests."""


@dataclass(slots=True)
class Traffic:
    """What was asked and what failed."""

    answered: Counter[int] = field(default_factory=Counter)
    """Version -> requests answered under its name."""
    failures: list[str] = field(default_factory=list)
    """Replica, name and error of each request that a replica should have answered."""

    @property
    def sent(self) -> int:
        """Requests that have ended."""
        return self.answered.total() + len(self.failures)


class TrafficClient:
    """Sends requests until `stop`.

    Args:
        ledger: asked before each request which versions are acked where.
        line: of the versions.
        engines: replica -> client of its engine.
    """

    def __init__(self, ledger: Ledger, line: str, engines: Mapping[str, EngineClient]) -> None:
        self.traffic = Traffic()
        self._ledger = ledger
        self._line = line
        self._engines = engines
        self._dice = random.Random(0)  # noqa: S311 - which request next is no secret
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Send until `stop`; requests in flight are finished."""
        await asyncio.gather(*(self._work() for _ in range(WORKERS)))

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()

    async def _work(self) -> None:
        while not self._stop.is_set():
            served = await asyncio.to_thread(self._served)
            if served:
                await self._ask(*self._dice.choice(served))
            await asyncio.sleep(_PAUSE_S)

    def _served(self) -> list[tuple[str, int]]:
        """(replica, version) for every ack in force on a version that should be served (I2)."""
        view = self._ledger.view(self._line)
        return [
            (replica, desired.version)
            for desired in view.desired
            for replica in view.acked_by(desired.version)
            if replica in self._engines
        ]

    async def _ask(self, replica: str, version: int) -> None:
        name = policy_name(self._line, version)
        try:
            await self._engines[replica].complete(
                name, PROMPT, MAX_TOKENS, temperature=1.0, seed=self._dice.getrandbits(31)
            )
        except EngineError as error:
            self.traffic.failures.append(f"{replica} {name}: {error}")
        else:
            self.traffic.answered[version] += 1
