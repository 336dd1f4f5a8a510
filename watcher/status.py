"""What a sidecar shows over HTTP: /healthz /readyz /status /metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from aiohttp import web

from policyline.watcher.core.model import Desired, Known, Observed, Plan, Unknown
from policyline.watcher.metrics import SidecarMetrics

_STALL_S: Final = 300.0
"""A loop without a pass for so long is stuck: above every time limit of one action."""


@dataclass(slots=True)
class SidecarStatus:
    """What the sidecar writes and the HTTP server reads; times are monotonic seconds."""

    line: str
    replica: str
    generation: int | None = None
    ledger_id: str = ""
    reconciled_at_s: float = 0.0
    """When the last pass began."""
    desired: Desired | Unknown = field(default_factory=lambda: Unknown("not read yet"))
    observed: Observed = field(default_factory=lambda: Unknown("not seen yet"))
    notes: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """What was odd about the probe of an acked version."""
    hang: str = ""
    """Why the engine is taken for hung; empty when it is not."""
    plan: Plan | None = None
    leaving: bool = False

    def unserved(self) -> list[str]:
        """Names that this replica should serve by now and does not; the candidate may wait."""
        if not isinstance(self.desired, Desired):
            return []
        incarnation = self.desired.incarnation
        return [
            v.name
            for v in self.desired.wanted
            if v.role != "candidate" and v.reported != "rejected" and not v.acked_by(incarnation)
        ]

    def why_not_ready(self) -> str:
        """One line; empty when ready."""
        if self.leaving:
            return "leaving"
        if self.generation is None:
            return "not joined"
        for what, seen in (("ledger", self.desired), ("engine", self.observed)):
            if isinstance(seen, Unknown):
                return f"{what}: {seen.cause}"
        if self.hang:
            return f"engine hangs: {self.hang}"
        missing = self.unserved()
        return f"not served yet: {', '.join(missing)}" if missing else ""


class StatusPages:
    """Answers the requests of operators and probes.

    Args:
        status: what is shown.
        metrics: shown on /metrics.
        now: the sidecar's monotonic clock.
    """

    def __init__(
        self, status: SidecarStatus, metrics: SidecarMetrics, now: Callable[[], float]
    ) -> None:
        self._status = status
        self._metrics = metrics
        self._now = now
        self._pages = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._show_status,
            "/metrics": self._show_metrics,
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Answer one request."""
        return self.answer(request.method, request.path)

    def answer(self, method: str, path: str) -> web.Response:
        """The answer to a request without a body."""
        page = self._pages.get(path.rstrip("/"))
        if page is None:
            return web.Response(status=404, text="not found")
        if method not in {"GET", "HEAD"}:
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        return page()

    def _healthz(self) -> web.Response:
        age_s = self._now() - self._status.reconciled_at_s
        alive = age_s <= _STALL_S
        text = "ok" if alive else f"no reconcile pass for {age_s:.0f} s"
        return web.Response(text=text, status=200 if alive else 503)

    def _readyz(self) -> web.Response:
        why_not = self._status.why_not_ready()
        return web.Response(text=why_not or "ok", status=503 if why_not else 200)

    def _show_status(self) -> web.Response:
        body = json.dumps(_status_json(self._status, self._now()), separators=(",", ":"))
        return web.Response(text=body, content_type="application/json")

    def _show_metrics(self) -> web.Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._metrics.text(), headers={"Content-Type": content_type})


def _status_json(status: SidecarStatus, now: float) -> dict[str, Any]:
    plan = status.plan
    return {
        "line": status.line,
        "replica": status.replica,
        "generation": status.generation,
        "ledger_id": status.ledger_id,
        "ready": not status.why_not_ready(),
        "why_not_ready": status.why_not_ready(),
        "desired": _desired(status.desired),
        "notes": {str(version): notes for version, notes in status.notes.items() if notes},
        "observed": _observed(status.observed),
        "plan": [
            {"action": type(a).__name__, "name": _target(a), "why": a.why}
            for a in (plan.actions if plan else ())
        ],
        "reasons": list(plan.reasons) if plan else [],
        "pending": [asdict(pending) for pending in plan.pending] if plan else [],
        "next_wake_s": round(max(0.0, plan.wake_at_s - now), 3) if plan else None,
        "last_reconcile_s": round(now - status.reconciled_at_s, 3),
    }


def _target(action: object) -> str | None:
    target = getattr(action, "target", None)
    name = getattr(action if target is None else target, "name", None)
    return name if isinstance(name, str) else None


def _desired(desired: Desired | Unknown) -> dict[str, Any]:
    if isinstance(desired, Unknown):
        return {"unknown": desired.cause}
    return {
        "incarnation": desired.incarnation,
        "versions": [
            {
                "version": v.version,
                "name": v.name,
                "digest": v.digest,
                "role": v.role or "out_of_window",
                "reported": v.reported,
                "acked": v.acked_by(desired.incarnation),
            }
            for v in (*desired.wanted, *desired.out_of_window)
        ],
    }


def _observed(observed: Observed) -> dict[str, Any]:
    match observed:
        case Unknown(cause, gone):
            return {"unknown": cause, "gone": gone}
        case Known():
            shown = asdict(observed)
            sets = {k: sorted(v) for k, v in shown.items() if isinstance(v, frozenset)}
            adapter_ids = {
                str(version): pending for version, pending in observed.adapter_ids.items()
            }
            return {**shown, **sets, "adapter_ids": adapter_ids}
