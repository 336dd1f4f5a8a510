"""The router as one object: wire the parts, listen, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Self

from policyline.http_server import HttpServer
from policyline.ledger.store import Ledger
from policyline.router.affinity.affinity import Affinity
from policyline.router.cancellation import InFlightCanceller
from policyline.router.dispatch import Dispatcher
from policyline.router.metrics import Metrics
from policyline.router.proxy import Proxy
from policyline.router.replicas import ReplicaMonitor
from policyline.router.rollouts.audit import Audit
from policyline.router.rollouts.spool import Spool
from policyline.router.rollouts.uploader import Uploader
from policyline.router.routes import Routes
from policyline.router.sessions import Sessions
from policyline.router.settings import RouterSettings
from policyline.router.status import RouterStatus
from policyline.router.trainer_api import TrainerApi
from policyline.router.trainer_backend import TrainerBackend
from policyline.router.upstream import Upstream
from policyline.router.view import ViewCache

log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.02
_CANCEL_GRACE_S = 1.0
"""Clients of requests that the drain did not wait for get this long to receive the error."""
_FIRST_REFRESH_S = 2.0
"""Replicas that take longer to report their block size are asked again later."""
_LAST_UPLOAD_S = 10.0
"""The last upload may take this long; the rest is uploaded after the next start."""


class Router:
    """One router. Use it as `async with create_app(...) as router: await router.listen(...)`.

    Args:
        settings: see `RouterSettings`.
        ledger: of the line; it stays open when the router ends.
        upstream_key: bearer for the replicas; None: none is sent.
        api_key: that clients must send; None: none is needed.
        trainer: serves unmodified trainers below /t/<run>; None: that is not served.
    """

    def __init__(
        self,
        settings: RouterSettings,
        ledger: Ledger,
        *,
        upstream_key: str | None = None,
        api_key: str | None = None,
        trainer: TrainerBackend | None = None,
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._spool = Spool(settings.spool)
        self._upstream = Upstream(
            api_key=upstream_key,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.read_timeout_s,
        )
        self.view_cache = ViewCache(settings, ledger)
        self.affinity = Affinity(spill=settings.spill, max_blocks=settings.max_blocks)
        self.uploader = Uploader(settings, ledger, self._spool)
        self._monitor = ReplicaMonitor(self._upstream, self.view_cache)
        metrics, sessions = Metrics(), Sessions(settings.pin_ttl_s)
        self._proxy = self._build_proxy(sessions, metrics)
        self._status = self._build_status(sessions)
        self._status.add_gauges_to(metrics)
        self._routes = Routes(
            self._proxy, self._build_trainer_api(), self._status, metrics, api_key=api_key
        )
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._http = HttpServer(self._routes.handle, shutdown_timeout_s=_CANCEL_GRACE_S)
        self.port: int | None = None
        """The port that it listens on."""

    def _build_proxy(self, sessions: Sessions, metrics: Metrics) -> Proxy:
        dispatcher = Dispatcher(
            self._settings,
            view_cache=self.view_cache,
            affinity=self.affinity,
            monitor=self._monitor,
            sessions=sessions,
            metrics=metrics,
            trainer=self._trainer,
        )
        canceller = InFlightCanceller()
        self.view_cache.on_gate_change.append(canceller.check)
        return Proxy(
            self._settings,
            dispatcher=dispatcher,
            monitor=self._monitor,
            upstream=self._upstream,
            canceller=canceller,
            audit=Audit(self._spool, metrics),
            metrics=metrics,
        )

    def _build_status(self, sessions: Sessions) -> RouterStatus:
        return RouterStatus(
            self._settings,
            view_cache=self.view_cache,
            affinity=self.affinity,
            monitor=self._monitor,
            sessions=sessions,
            uploader=self.uploader,
            proxy=self._proxy,
        )

    def _build_trainer_api(self) -> TrainerApi | None:
        if self._trainer is None:
            return None
        return TrainerApi(
            self._settings,
            trainer=self._trainer,
            view_cache=self.view_cache,
            status=self._status,
            upstream=self._upstream,
        )

    async def __aenter__(self) -> Self:
        """Read the ledger and begin to follow it.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        await self._upstream.__aenter__()
        try:
            await self.view_cache.start()
        except BaseException:
            await self._upstream.__aexit__()
            self._spool.close()
            raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_REFRESH_S):
                await self._monitor.refresh()
        self._tasks = [
            asyncio.create_task(self._monitor.run()),
            asyncio.create_task(self.uploader.run()),
        ]
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Drain, upload the last rollouts and release everything."""
        await self._drain()
        await self._http.close()
        await self._upstream.__aexit__()
        refreshing, uploading = self._tasks
        refreshing.cancel()
        self.uploader.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_UPLOAD_S):
                await uploading
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._trainer is not None:
            await self._trainer.close()
        await self.view_cache.stop()
        self._spool.close()

    async def listen(self, host: str, port: int) -> int:
        """Serve at an address; 0 takes a free port. Returns the port.

        Raises:
            ListenFailed: the address cannot be bound.
        """
        self.port = await self._http.listen(host, port)
        log.info(
            "listening on %s:%d", host, self.port, extra={"event": "listening", "port": self.port}
        )
        return self.port

    def stop(self) -> None:
        """Make `run` end."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._stop.wait()

    async def _drain(self) -> None:
        """Accept no new requests and wait for the open ones, for `drain_timeout_s` at most."""
        self._status.draining = True
        await self._http.stop_listening()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_timeout_s
        while self._proxy.open_requests and loop.time() < deadline:  # noqa: ASYNC110 - bounded, rare
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._proxy.open_requests:
            log.warning("%d requests are cancelled", self._proxy.open_requests)
            self._proxy.cancel_all()


def create_app(
    settings: RouterSettings,
    ledger: Ledger,
    *,
    upstream_key: str | None = None,
    api_key: str | None = None,
    trainer: TrainerBackend | None = None,
) -> Router:
    """A router; see `Router`. Call it in a running event loop.

    Raises:
        SpoolUnusable: its spool cannot be written, or another router uses it.
    """
    return Router(settings, ledger, upstream_key=upstream_key, api_key=api_key, trainer=trainer)
