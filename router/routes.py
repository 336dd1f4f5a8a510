"""The HTTP surface: an allow-list of routes, and nothing else reaches an engine."""

from __future__ import annotations

import base64
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from policyline.ledger.errors import InvalidName
from policyline.ledger.names import check_label
from policyline.router.answers import Refused, json_response
from policyline.router.gate import RUN_UNKNOWN
from policyline.router.metrics import Metrics
from policyline.router.proxy import Proxy
from policyline.router.status import State
from policyline.router.texts import cut
from policyline.router.trainer_api import Control

log = logging.getLogger(__name__)

GENERATION: Final = ("/v1/completions", "/v1/chat/completions")
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Surface:
    """Finds who answers a request.

    Args:
        proxy: answers completions.
        control: answers an unmodified trainer.
        state: tells /health and /status.
        metrics: shown on /metrics.
        api_key: that clients must send as bearer, but for /health; None: nobody must.
    """

    def __init__(
        self,
        proxy: Proxy,
        control: Control | None,
        state: State,
        metrics: Metrics,
        *,
        api_key: str | None,
    ) -> None:
        self._proxy = proxy
        self._control = control
        self._state = state
        self._metrics = metrics
        self._bearer = f"Bearer {api_key}".encode() if api_key else None
        self._routes: dict[tuple[str, str], _Handler] = {
            ("GET", "/health"): self._health,
            ("HEAD", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/status"): self._status,
            ("GET", "/metrics"): self._show_metrics,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        try:
            return await self._dispatch(request)
        except Refused as refused:
            self._metrics.refusals[refused.code] += 1
            self._metrics.answers[refused.status] += 1
            return refused.response()
        except (ConnectionError, web.HTTPException):
            raise
        except Exception:
            log.exception("a request could not be answered", extra={"event": "router_error"})
            return Refused(500, "router_error", "the router failed; see its log").response()

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        path, method = request.path, request.method
        self._check_key(request, path)
        if path in GENERATION and method == "POST":
            return await self._proxy.answer(request, path)
        handler = self._routes.get((method, path))
        if handler is not None:
            return await handler(request)
        if path.startswith("/t/") and self._control is not None:
            run, _, rest = path[3:].partition("/")
            _check_run_name(run)
            if f"/{rest}" in GENERATION and method == "POST":
                return await self._proxy.answer(request, f"/{rest}", run)
            return await self._control.answer(request, run, f"/{rest}")
        raise Refused(404, "no_such_route", f"{method} {path[:200]} is not served here")

    def _check_key(self, request: web.BaseRequest, path: str) -> None:
        if self._bearer is None or path == "/health":
            return
        given = request.headers.get("authorization", "").encode(errors="surrogateescape")
        if given.startswith(b"Basic "):
            given = _password_as_bearer(given)
        if not hmac.compare_digest(given, self._bearer):
            raise Refused(401, "unauthorized", "the API key is missing or wrong")

    async def _health(self, _request: web.BaseRequest) -> web.StreamResponse:
        health = self._state.health()
        return json_response(health, 200 if health["healthy"] else 503)

    async def _models(self, _request: web.BaseRequest) -> web.StreamResponse:
        served = self._state.served()
        cards: list[dict[str, Any]] = [
            {"id": name, "object": "model", "created": 0, "owned_by": "policyline"}
            for name in served
        ]
        return json_response({"object": "list", "data": cards})

    async def _status(self, _request: web.BaseRequest) -> web.StreamResponse:
        return json_response(self._state.status())

    async def _show_metrics(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.text(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _check_run_name(run: str) -> None:
    try:
        check_label("run", run)
    except InvalidName as error:
        raise Refused(404, RUN_UNKNOWN, f"{cut(run)} is no run's name; {error.hint}") from error


def _password_as_bearer(basic: bytes) -> bytes:
    """A trainer can only be given a URL: http://anybody:KEY@host, which becomes Basic."""
    try:
        _, _, password = base64.b64decode(basic[6:], validate=True).partition(b":")
    except ValueError:
        return b""
    return b"Bearer " + password
