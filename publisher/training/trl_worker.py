"""The rollout loop in TRL's child process: asks only for what some replica serves."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import policy_name
from policyline.ledger.store import Ledger
from policyline.publisher.training.follower import Follower
from policyline.publisher.training.trl_private import RolloutLoop

_LOOK_S: Final = 0.05
"""Between two looks while no replica serves the version."""


@dataclass(frozen=True, slots=True)
class Places:
    """Which servers rollouts may go to, where there is no router. Picklable."""

    ledger: str
    servers: Mapping[str, str]
    """Replica -> base URL."""


class Acks:
    """Which of the servers hold an ack, as the ledger says it now."""

    def __init__(self, places: Places, line: str) -> None:
        self._servers = places.servers
        self._lock = threading.Lock()
        self._view: LineSnapshot | None = None
        self._in_flight: Counter[str] = Counter()
        self._follower = Follower(
            Ledger(places.ledger), line, also=lambda: (), seen=self._see, poll_s=1.0
        )

    def pick(self, version: int, avoid: str | None) -> str | None:
        """The replica with the fewest requests in flight; None when none serves the version.

        Args:
            version: that is asked for.
            avoid: replica that has just failed; taken only when there is no other.
        """
        with self._lock:
            view = self._view
        if view is None:
            return None
        able = [r for r in view.acked_by(version) if r in self._servers]
        others = [r for r in able if r != avoid] or able
        return min(others, key=lambda r: self._in_flight[r], default=None)

    def url(self, replica: str) -> str:
        """Its base URL."""
        return self._servers[replica].rstrip("/")

    def begin(self, replica: str) -> None:
        """A request is on its way to it."""
        self._in_flight[replica] += 1

    def end(self, replica: str) -> None:
        """It was answered, or failed."""
        self._in_flight[replica] -= 1

    def _see(self, view: LineSnapshot) -> None:
        with self._lock:
            self._view = view


@dataclass(slots=True)
class _Ask:
    """One request over all its attempts."""

    failed: str | None = field(default=None)
    """Replica that failed last."""


class PolicyRolloutLoop(RolloutLoop):
    """TRL's loop, with the version and the server chosen anew at each attempt of a request.

    TRL repeats a failed request under the name it had, also when no server serves it any more.
    The trainer tells the version through TRL's shared number, below zero while no replica serves
    it: requests wait then.

    Args:
        places: servers to choose from; None sends everything to `vllm_server_url`.
        kwargs: TRL's own.
    """

    def __init__(self, *, places: Places | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._acks = None if places is None else Acks(places, self.lora_name)

    @property
    def model_version(self) -> int:
        """What TRL stamps samples with."""
        return abs(int(self._model_version_value.value))

    def run(self) -> None:
        """TRL's; then the process ends without waiting for somebody to take what is left."""
        try:
            super().run()
        finally:
            for left in (self.rollout_buffer, self._metrics_queue):
                left.cancel_join_thread()

    async def _post(
        self,
        path: str,
        payload: dict[str, Any],
        timeout: float,  # noqa: ASYNC109 - TRL's signature
        max_retries: int = 3,
    ) -> Any:
        ask = _Ask()

        async def attempt() -> Any:
            return await self._attempt(ask, path, payload, timeout)

        return await self._retry(attempt, label=f"POST {path}", max_attempts=max_retries)

    async def _attempt(self, ask: _Ask, path: str, payload: dict[str, Any], limit_s: float) -> Any:
        version, replica = await self._served(ask.failed)
        body = {**payload, "model": policy_name(self.lora_name, version)}
        if self._acks is None or replica is None:
            return await self._send(self.vllm_server_url + path, body, limit_s)
        self._acks.begin(replica)
        try:
            return await self._send(self._acks.url(replica) + path, body, limit_s)
        except Exception:
            ask.failed = replica
            raise
        finally:
            self._acks.end(replica)

    async def _served(self, failed: str | None) -> tuple[int, str | None]:
        """Wait for a version that is served; the trainer watches how long that takes."""
        while True:
            version = int(self._model_version_value.value)
            if version > 0:
                if self._acks is None:
                    return version, None
                replica = self._acks.pick(version, failed)
                if replica is not None:
                    return version, replica
            await asyncio.sleep(_LOOK_S)

    async def _send(self, url: str, body: Mapping[str, Any], limit_s: float) -> Any:
        limit = aiohttp.ClientTimeout(total=limit_s)
        async with self.session.post(url, json=body, timeout=limit) as response:
            response.raise_for_status()
            return await response.json() or {}
