"""The HTTP routes: an allow-list; nothing else reaches an engine."""

from __future__ import annotations

import base64
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from policyline.ledger.errors import InvalidName, LedgerUnavailable
from policyline.ledger.names import check_label
from policyline.router.answers import HttpRefused
from policyline.router.gate import RUN_UNKNOWN, shorten
from policyline.router.metrics import Metrics
from policyline.router.proxy import Proxy
from policyline.router.status import RouterStatus
from policyline.router.trainer_api import TrainerApi

log = logging.getLogger(__name__)

GENERATION: Final = ("/v1/completions", "/v1/chat/completions")
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Routes:
    """Authenticates a request and calls its handler.

    Args:
        proxy: answers completions.
        trainer_api: answers an unmodified trainer; None: that is not served.
        status: answers /health and /status.
        metrics: answer /metrics.
        api_key: that clients must send as bearer, except to /health; None: no key is needed.
    """

    def __init__(
        self,
        proxy: Proxy,
        trainer_api: TrainerApi | None,
        status: RouterStatus,
        metrics: Metrics,
        *,
        api_key: str | None,
    ) -> None:
        self._proxy = proxy
        self._trainer_api = trainer_api
        self._status = status
        self._metrics = metrics
        self._bearer = f"Bearer {api_key}".encode() if api_key else None
        self._handlers: dict[tuple[str, str], _Handler] = {
            ("GET", "/health"): self._get_health,
            ("HEAD", "/health"): self._get_health,
            ("GET", "/v1/models"): self._get_models,
            ("GET", "/status"): self._get_status,
            ("GET", "/metrics"): self._get_metrics,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request."""
        try:
            return await self._dispatch(request)
        except (HttpRefused, LedgerUnavailable) as error:
            refused = _ledger_unreachable(error) if isinstance(error, LedgerUnavailable) else error
            self._metrics.refusals.labels(refused.code).inc()
            self._metrics.answers.labels(refused.status).inc()
            return refused.response()
        except (ConnectionError, web.HTTPException):
            raise
        except Exception:
            log.exception("a request could not be answered", extra={"event": "router_error"})
            return HttpRefused(500, "router_error", "the router failed; see its log").response()

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        path, method = request.path, request.method
        self._check_key(request, path)
        if path in GENERATION and method == "POST":
            return await self._proxy.answer(request, path)
        handler = self._handlers.get((method, path))
        if handler is not None:
            return await handler(request)
        if path.startswith("/t/") and self._trainer_api is not None:
            run, _, rest = path[3:].partition("/")
            _check_run_name(run)
            if f"/{rest}" in GENERATION and method == "POST":
                return await self._proxy.answer(request, f"/{rest}", run)
            return await self._trainer_api.answer(request, run, f"/{rest}")
        raise HttpRefused(404, "no_such_route", f"{method} {path[:200]} is not served here")

    def _check_key(self, request: web.BaseRequest, path: str) -> None:
        if self._bearer is None or path == "/health":
            return
        given = request.headers.get("authorization", "").encode(errors="surrogateescape")
        if given.startswith(b"Basic "):
            given = _password_as_bearer(given)
        if not hmac.compare_digest(given, self._bearer):
            raise HttpRefused(401, "unauthorized", "the API key is missing or wrong")

    async def _get_health(self, _request: web.BaseRequest) -> web.StreamResponse:
        health = self._status.health()
        return web.json_response(health, status=200 if health["healthy"] else 503)

    async def _get_models(self, _request: web.BaseRequest) -> web.StreamResponse:
        served = self._status.served_names()
        cards: list[dict[str, Any]] = [
            {"id": name, "object": "model", "created": 0, "owned_by": "policyline"}
            for name in served
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _get_status(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(self._status.status())

    async def _get_metrics(self, _request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.text(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _ledger_unreachable(error: LedgerUnavailable) -> HttpRefused:
    return HttpRefused(503, "ledger_unreachable", str(error), retry_after_s=2)


def _check_run_name(run: str) -> None:
    try:
        check_label("run", run)
    except InvalidName as error:
        raise HttpRefused(
            404, RUN_UNKNOWN, f"{shorten(run)} is not a run's name; {error.hint}"
        ) from error


def _password_as_bearer(basic: bytes) -> bytes:
    """The key from a URL like http://any:KEY@host, all that a trainer can be given, as a bearer."""
    try:
        _, _, password = base64.b64decode(basic[6:], validate=True).partition(b":")
    except ValueError:
        return b""
    return b"Bearer " + password
