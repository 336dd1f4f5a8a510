"""What a sidecar shows over HTTP: /healthz /readyz /status /metrics."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from policyline.watcher.core.model import Desired, Known, Observed, Plan, Unknown
from policyline.watcher.errors import StatusListenFailed
from policyline.watcher.metrics import SidecarMetrics

_STALL_S: Final = 300.0
"""A loop that has not gone round for so long is stuck: above every time limit of one action."""


@dataclass(slots=True)
class SidecarStatus:
    """What the sidecar writes and the HTTP server reads; times are monotonic seconds."""

    line: str
    replica: str
    generation: int | None = None
    ledger_id: str = ""
    reconciled_at_s: float = 0.0
    """When the loop last went round."""
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


def create_app(
    status: SidecarStatus, metrics: SidecarMetrics, now: Callable[[], float]
) -> Starlette:
    """The ASGI application.

    Args:
        status: what is shown.
        metrics: shown on /metrics.
        now: the sidecar's monotonic clock.
    """

    async def healthz(_request: Request) -> Response:
        age_s = now() - status.reconciled_at_s
        alive = age_s <= _STALL_S
        text = "ok" if alive else f"the loop has not gone round for {age_s:.0f} s"
        return PlainTextResponse(text, 200 if alive else 503)

    async def readyz(_request: Request) -> Response:
        why_not = status.why_not_ready()
        return PlainTextResponse(why_not or "ok", 503 if why_not else 200)

    async def show_status(_request: Request) -> Response:
        return JSONResponse(_status_json(status, now()))

    async def show_metrics(_request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/status", show_status),
            Route("/metrics", show_metrics),
        ]
    )


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


class StatusServer:
    """Serves the application in the running loop; without uvicorn's signal handlers and ticks.

    Args:
        app: from `create_app`.
        host: address to listen on.
        port: 0 takes a free one.
    """

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        config = uvicorn.Config(app, access_log=False, log_config=None, lifespan="off", ws="none")
        config.load()
        self._http = uvicorn.Server(config)
        self._http.lifespan = config.lifespan_class(config)
        self._host, self._port = host, port

    async def start(self) -> int:
        """Listen; return the port.

        Raises:
            StatusListenFailed: the address cannot be used.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # with the protocol named, asyncio switches Nagle's algorithm off
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
        except OSError as error:
            listener.close()
            raise StatusListenFailed(
                f"cannot listen on {self._host}:{self._port}: {error.strerror}",
                hint="choose another --listen",
            ) from error
        await self._http.startup(sockets=[listener])
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the listener and every connection. Idempotent."""
        for server in getattr(self._http, "servers", ()):
            server.close()
        for connection in list(self._http.server_state.connections):
            connection.shutdown()
        self._http.servers = []
