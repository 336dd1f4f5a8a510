"""What the router reports about itself and the fleet: /health, /status and gauges."""

from __future__ import annotations

import time
from typing import Any

from policyline.ledger.names import policy_name
from policyline.router.affinity.affinity import Affinity
from policyline.router.gate import Serve
from policyline.router.metrics import Metrics
from policyline.router.proxy import Proxy
from policyline.router.replicas import ReplicaMonitor
from policyline.router.rollouts.uploader import Uploader
from policyline.router.sessions import Sessions
from policyline.router.settings import RouterSettings
from policyline.router.view import ViewCache


class RouterStatus:
    """Reads the parts of the router on demand.

    Args:
        settings: of the router.
        view_cache: holds the view and the gate.
        affinity: counts choices and load.
        monitor: knows the block size.
        sessions: that are pinned.
        uploader: counts rollouts.
        proxy: counts open requests.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        view_cache: ViewCache,
        affinity: Affinity,
        monitor: ReplicaMonitor,
        sessions: Sessions,
        uploader: Uploader,
        proxy: Proxy,
    ) -> None:
        self._settings = settings
        self._view_cache = view_cache
        self._affinity = affinity
        self._monitor = monitor
        self._sessions = sessions
        self._uploader = uploader
        self._proxy = proxy
        self.draining = False
        """The router is stopping: clients should send no new requests."""

    def served_names(self) -> list[str]:
        """Model names that clients can request: served versions, and the alias if it has one."""
        gate = self._view_cache.gate
        names = [v.name for v in gate.verdicts.values() if isinstance(v, Serve)]
        return names if gate.current is None else [*names, self._settings.alias]

    def health(self) -> dict[str, Any]:
        """Whether enough replicas serve current, and all known problems."""
        current = self._view_cache.gate.current
        serving = [] if current is None else self._serving(current)
        enough = len(serving) >= self._settings.min_ready
        return {
            "healthy": enough and current is not None and not self.draining,
            "degraded": bool(problems := self._problems(current, serving)),
            "problems": problems,
            "line": self._settings.line,
            "current": None if current is None else policy_name(self._settings.line, current),
            "serving": serving,
            "joined": self._view_cache.joined(),
            "min_ready": self._settings.min_ready,
        }

    def status(self) -> dict[str, Any]:
        """Everything that /status shows."""
        view = self._view_cache.view
        return {
            **self.health(),
            "draining": self.draining,
            "ledger": {
                "up": self._view_cache.ledger_up,
                "id": view.ledger_id,
                "seq": view.seq,
                "age_s": round(time.monotonic() - self._view_cache.read_at_s, 3),
            },
            "versions": {
                d.name: {
                    "role": d.role,
                    "digest": d.digest,
                    "serving": self._serving(d.version),
                }
                for d in view.desired
            },
            "replicas": self._replicas(),
            "choices": dict(self._affinity.kinds),
            "open_requests": self._proxy.open_requests,
            "sessions": len(self._sessions),
            "prefix_blocks": self._affinity.known_blocks,
            "block_tokens": self._monitor.block_tokens,
            "rollouts": {
                "uploaded": self._uploader.uploaded,
                "batches_waiting": self._uploader.waiting,
            },
        }

    def add_gauges_to(self, metrics: Metrics) -> None:
        """Add this status to the metrics."""
        for name, text, value in (
            ("healthy", "1 while /health is 200.", lambda: float(self.health()["healthy"])),
            ("ledger_up", "1 while the ledger can be read.", lambda: self._view_cache.ledger_up),
            (
                "serving_current",
                "Replicas that serve current.",
                lambda: len(self.health()["serving"]),
            ),
            ("open_requests", "Requests not answered yet.", lambda: self._proxy.open_requests),
            (
                "in_flight_imbalance",
                "Requests in flight at the busiest replica, minus those at the idlest.",
                self._imbalance,
            ),
            (
                "batches_waiting",
                "Batches of rollouts that the ledger does not have yet.",
                lambda: self._uploader.waiting,
            ),
            ("prefix_blocks", "Prefix blocks remembered.", lambda: self._affinity.known_blocks),
            ("sessions", "Sessions pinned to a version.", lambda: len(self._sessions)),
        ):
            metrics.add_gauge(name, text, value)

    def _serving(self, version: int) -> list[str]:
        """Replicas that may get a request for the version."""
        verdict = self._view_cache.gate.judge_version(version)
        return [e.replica for e in verdict.endpoints] if isinstance(verdict, Serve) else []

    def _problems(self, current: int | None, serving: list[str]) -> list[str]:
        problems = []
        if self.draining:
            problems.append("draining")
        if current is None:
            problems.append("nothing is current")
        elif len(serving) < self._settings.min_ready:
            problems.append(f"current is served by {len(serving)} of {self._settings.min_ready}")
        if not self._view_cache.ledger_up:
            problems.append("the ledger cannot be reached")
        if behind := sorted(set(self._view_cache.joined()) - set(serving)):
            problems.append(f"current is not served by {', '.join(behind)}")
        return problems

    def _replicas(self) -> dict[str, Any]:
        in_flight = self._affinity.in_flight()
        return {
            name: {
                "state": row.state,
                "incarnation": row.incarnation,
                "url": row.url,
                "slots": row.max_loras,
                "in_flight": in_flight[name],
                "routed": self._affinity.routed[name],
            }
            for name, row in self._view_cache.view.replicas.items()
        }

    def _imbalance(self) -> float:
        in_flight = self._affinity.in_flight()
        counts = [in_flight[replica] for replica in self._view_cache.joined()]
        return float(max(counts, default=0) - min(counts, default=0))
