"""What the router tells of itself and the fleet: /health, /status, gauges."""

from __future__ import annotations

import time
from typing import Any

from policyline.ledger.names import policy_name
from policyline.router.affinity.affinity import Affinity
from policyline.router.gate import Serve
from policyline.router.metrics import Metrics
from policyline.router.proxy import Proxy
from policyline.router.replicas import Fleet
from policyline.router.rollouts.shipper import Shipper
from policyline.router.sessions import Sessions
from policyline.router.settings import RouterSettings
from policyline.router.view import Keeper


class State:
    """Reads the parts when somebody asks.

    Args:
        settings: of the router.
        keeper: of the view.
        affinity: counts choices and load.
        fleet: knows the block size.
        sessions: of the alias.
        shipper: of the rollouts.
        proxy: counts what is in hand.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        keeper: Keeper,
        affinity: Affinity,
        fleet: Fleet,
        sessions: Sessions,
        shipper: Shipper,
        proxy: Proxy,
    ) -> None:
        self._settings = settings
        self._keeper = keeper
        self._affinity = affinity
        self._fleet = fleet
        self._sessions = sessions
        self._shipper = shipper
        self._proxy = proxy
        self.draining = False
        """No new request should come: the router ends."""

    def serving(self, version: int | None) -> list[str]:
        """Replicas that a request for the version may go to."""
        gate = self._keeper.gate
        if gate is None or version is None:
            return []
        verdict = gate.judge_version(version)
        return [seat.replica for seat in verdict.seats] if isinstance(verdict, Serve) else []

    def joined(self) -> list[str]:
        """Replicas that are in the fleet."""
        return [replica for replica, _ in self._keeper.lives()]

    def served(self) -> list[str]:
        """Names that may be asked for: versions, and the alias while it means something."""
        gate = self._keeper.gate
        verdicts = () if gate is None else gate.verdicts.values()
        names = [v.name for v in verdicts if isinstance(v, Serve)]
        return [*names, self._settings.alias] if self._keeper.current() is not None else names

    def health(self) -> dict[str, Any]:
        """Whether current is served by enough replicas, and what is missing."""
        current = self._keeper.current()
        serving, joined = self.serving(current), self.joined()
        enough = len(serving) >= self._settings.min_ready
        problems = []
        if self.draining:
            problems.append("draining")
        if current is None:
            problems.append("nothing is current")
        elif not enough:
            problems.append(f"current is served by {len(serving)} of {self._settings.min_ready}")
        if not self._keeper.ledger_up:
            problems.append("the ledger is away")
        if behind := sorted(set(joined) - set(serving)):
            problems.append(f"current is not served by {', '.join(behind)}")
        return {
            "healthy": enough and current is not None and not self.draining,
            "degraded": bool(problems),
            "problems": problems,
            "line": self._settings.line,
            "current": None if current is None else policy_name(self._settings.line, current),
            "serving": serving,
            "joined": joined,
            "min_ready": self._settings.min_ready,
        }

    def status(self) -> dict[str, Any]:
        """Everything."""
        view, in_flight = self._keeper.view, self._affinity.in_flight()
        names = [] if view is None else [d.name for d in view.desired]
        desired = [] if view is None else view.desired
        return {
            **self.health(),
            "draining": self.draining,
            "ledger": {
                "up": self._keeper.ledger_up,
                "id": "" if view is None else view.ledger_id,
                "seq": 0 if view is None else view.seq,
                "age_s": round(time.monotonic() - self._keeper.read_at_s, 3),
            },
            "versions": {
                name: {"role": d.role, "digest": d.digest, "serving": self.serving(d.version)}
                for name, d in zip(names, desired, strict=True)
            },
            "replicas": {
                name: {
                    "state": row.state,
                    "incarnation": row.incarnation,
                    "url": row.url,
                    "slots": row.max_loras,
                    "in_flight": in_flight[name],
                    "routed": self._affinity.routed[name],
                }
                for name, row in (view.replicas.items() if view is not None else ())
            },
            "choices": dict(self._affinity.kinds),
            "in_hand": self._proxy.in_hand,
            "sessions": len(self._sessions),
            "prefix_blocks": self._affinity.known_blocks,
            "block_tokens": self._fleet.block_tokens,
            "rollouts": {
                "shipped": self._shipper.shipped,
                "batches_waiting": self._shipper.waiting,
            },
        }

    def show_on(self, metrics: Metrics) -> None:
        """Add the gauges."""
        metrics.show("healthy", "1 while /health is 200.", lambda: float(self.health()["healthy"]))
        metrics.show(
            "ledger_up", "1 while the ledger can be read.", lambda: float(self._keeper.ledger_up)
        )
        metrics.show(
            "serving_current",
            "Replicas that serve current.",
            lambda: len(self.serving(self._keeper.current())),
        )
        metrics.show("in_hand", "Requests not answered yet.", lambda: self._proxy.in_hand)
        metrics.show(
            "in_flight_imbalance", "Most in flight at a replica over the least.", self._apart
        )
        metrics.show(
            "batches_waiting", "Batches of rollouts to ship.", lambda: self._shipper.waiting
        )
        metrics.show(
            "prefix_blocks", "Prefix blocks remembered.", lambda: self._affinity.known_blocks
        )
        metrics.show("sessions", "Sessions pinned to a version.", lambda: len(self._sessions))

    def _apart(self) -> float:
        counts = [self._affinity.in_flight()[replica] for replica in self.joined()]
        return float(max(counts, default=0) - min(counts, default=0))
