"""The rollout loop in TRL's child process: asks only for what some replica serves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import policy_name
from policyline.ledger.store import Ledger
from policyline.publisher.training.snapshot_thread import SnapshotThread
from policyline.publisher.training.trl_private import RolloutLoop

_POLL_S: Final = 0.05
"""Between two checks while no replica serves the version."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The servers that rollouts may go to, where there is no router. Picklable."""

    ledger: str
    servers: Mapping[str, str]
    """Replica -> base URL."""


class AckedEndpoints:
    """Chooses a server that holds an ack for the version, as the ledger says now.

    Args:
        endpoints: the servers.
        line: prefix of the versions' names.
    """

    def __init__(self, endpoints: Endpoints, line: str) -> None:
        self._servers = endpoints.servers
        self._snapshot: LineSnapshot | None = None
        self._in_flight: Counter[str] = Counter()
        self._snapshots = SnapshotThread(
            Ledger(endpoints.ledger),
            line,
            extra_versions=lambda: (),
            on_snapshot=self._update,
        )

    def pick(self, version: int, avoid: str | None) -> str | None:
        """The replica with the fewest requests in flight; None when none serves the version.

        Args:
            version: that is asked for.
            avoid: replica that has just failed; taken only when there is no other.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return None
        able = [r for r in snapshot.acked_by(version) if r in self._servers]
        others = [r for r in able if r != avoid] or able
        return min(others, key=lambda r: self._in_flight[r], default=None)

    @contextmanager
    def request(self, replica: str) -> Iterator[str]:
        """Count a request while it lasts; the replica's base URL, without a slash at the end."""
        self._in_flight[replica] += 1
        try:
            yield self._servers[replica].rstrip("/")
        finally:
            self._in_flight[replica] -= 1

    def _update(self, snapshot: LineSnapshot) -> None:
        self._snapshot = snapshot


class PolicyRolloutLoop(RolloutLoop):
    """TRL's loop, which chooses version and server again at each attempt of a request.

    TRL repeats a failed request under the name it had, even when no server serves it any more.
    The trainer sets the version through TRL's shared number. It is below zero while no replica
    serves it: requests wait then.

    Args:
        endpoints: servers to choose from; None sends everything to `vllm_server_url`.
        kwargs: TRL's own.
    """

    def __init__(self, *, endpoints: Endpoints | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._endpoints = None if endpoints is None else AckedEndpoints(endpoints, self.lora_name)

    @property
    def model_version(self) -> int:
        """The version that TRL stamps on samples."""
        return abs(int(self._model_version_value.value))

    def run(self) -> None:
        """TRL's; then the process ends without waiting for somebody to read what is queued."""
        try:
            super().run()
        finally:
            for queue in (self.rollout_buffer, self._metrics_queue):
                queue.cancel_join_thread()

    async def _post(
        self,
        path: str,
        payload: dict[str, Any],
        timeout: float,  # noqa: ASYNC109 - TRL's signature
        max_retries: int = 3,
    ) -> Any:
        failed: str | None = None

        async def attempt() -> Any:
            nonlocal failed
            version, replica = await self._wait_served(avoid=failed)
            body = {**payload, "model": policy_name(self.lora_name, version)}
            if self._endpoints is None or replica is None:
                return await self._send(self.vllm_server_url + path, body, timeout)
            try:
                with self._endpoints.request(replica) as url:
                    return await self._send(url + path, body, timeout)
            except Exception:
                failed = replica
                raise

        return await self._retry(attempt, label=f"POST {path}", max_attempts=max_retries)

    async def _wait_served(self, avoid: str | None) -> tuple[int, str | None]:
        """Wait for a version that is served; the trainer bounds how long that may take."""
        while True:
            version = int(self._model_version_value.value)
            if version > 0:
                if self._endpoints is None:
                    return version, None
                replica = self._endpoints.pick(version, avoid)
                if replica is not None:
                    return version, replica
            await asyncio.sleep(_POLL_S)

    async def _send(self, url: str, body: Mapping[str, Any], limit_s: float) -> Any:
        limit = aiohttp.ClientTimeout(total=limit_s)
        async with self.session.post(url, json=body, timeout=limit) as response:
            response.raise_for_status()
            return await response.json() or {}
