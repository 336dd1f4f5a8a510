"""The router as one object: wire the parts, listen, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import Self

from policyline.http_server import HttpServer
from policyline.ledger.store import Ledger
from policyline.router.affinity.affinity import Affinity
from policyline.router.bell import Bell
from policyline.router.cancellation import Vigil
from policyline.router.dispatch import Placing
from policyline.router.metrics import Metrics
from policyline.router.proxy import Proxy
from policyline.router.replicas import Fleet
from policyline.router.rollouts.audit import Audit
from policyline.router.rollouts.shipper import Shipper
from policyline.router.rollouts.spool import Spool
from policyline.router.routes import Surface
from policyline.router.sessions import Sessions
from policyline.router.settings import RouterSettings
from policyline.router.status import State
from policyline.router.trainer_api import Control
from policyline.router.trainer_backend import Trainer
from policyline.router.upstream import Upstream
from policyline.router.view import Keeper

log = logging.getLogger(__name__)

_DRAIN_LOOK_S = 0.02
_CUT_OFF_S = 1.0
"""What is still in hand after the drain gets so long to hear of it."""
_LEARN_FIRST_S = 2.0
"""Replicas that take longer to tell their block size are asked again later."""
_SHIP_LAST_S = 10.0
"""The last batches may take so long; what is not shipped then is shipped after the next start."""


class Router:
    """One router. Use it as `async with create_app(...) as router: await router.listen(...)`.

    Args:
        settings: see `RouterSettings`.
        ledger: of the line; stays open when this ends.
        upstream_key: bearer for the replicas; None: none is sent.
        api_key: that clients must send; None: none is asked for.
        trainer: serves unmodified trainers below /t/<run>; None: that is not served.
    """

    def __init__(
        self,
        settings: RouterSettings,
        ledger: Ledger,
        *,
        upstream_key: str | None = None,
        api_key: str | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._spool = Spool(settings.spool)
        self._upstream = Upstream(
            api_key=upstream_key,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.read_timeout_s,
        )
        changed, metrics = Bell(), Metrics()
        self.keeper = Keeper(settings, ledger, changed)
        self.affinity = Affinity(spill=settings.spill, max_blocks=settings.max_blocks)
        self._fleet = Fleet(self._upstream, self.keeper)
        sessions = Sessions(settings.pin_ttl_s)
        self.shipper = Shipper(settings, ledger, self._spool)
        placing = Placing(
            settings,
            keeper=self.keeper,
            affinity=self.affinity,
            fleet=self._fleet,
            sessions=sessions,
            metrics=metrics,
            changed=changed,
            trainer=trainer,
        )
        self._vigil = Vigil(self.keeper)
        self._proxy = Proxy(
            settings,
            placing=placing,
            fleet=self._fleet,
            upstream=self._upstream,
            vigil=self._vigil,
            audit=Audit(self._spool, metrics),
            metrics=metrics,
        )
        self._state = State(
            settings,
            keeper=self.keeper,
            affinity=self.affinity,
            fleet=self._fleet,
            sessions=sessions,
            shipper=self.shipper,
            proxy=self._proxy,
        )
        self._state.show_on(metrics)
        control = None
        if trainer is not None:
            control = Control(
                settings,
                trainer=trainer,
                keeper=self.keeper,
                state=self._state,
                upstream=self._upstream,
            )
        self._surface = Surface(self._proxy, control, self._state, metrics, api_key=api_key)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._http = HttpServer(self._surface.handle, shutdown_timeout_s=_CUT_OFF_S)
        self.port: int | None = None
        """Where it listens."""

    async def __aenter__(self) -> Self:
        """Read the ledger and begin to follow it.

        Raises:
            LedgerError: it cannot be read.
        """
        await self._upstream.__aenter__()
        try:
            await self.keeper.start()
        except BaseException:
            await self._upstream.__aexit__(None, None, None)
            self._spool.close()
            raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEARN_FIRST_S):
                await self._fleet.learn()
        self._tasks = [
            asyncio.create_task(self._fleet.learn_for_ever()),
            asyncio.create_task(self._vigil.run()),
            asyncio.create_task(self.shipper.run()),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drain, ship the last rollouts, let go."""
        await self._drain()
        await self._http.close()
        await self._upstream.__aexit__(None, None, None)
        *others, shipping = self._tasks
        for task in others:
            task.cancel()
        self.shipper.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHIP_LAST_S):
                await shipping
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._trainer is not None:
            await self._trainer.close()
        await self.keeper.stop()
        self._spool.close()

    async def listen(self, host: str, port: int) -> int:
        """Serve at an address; 0 takes a free port. Returns the port.

        Raises:
            ListenFailed: the address cannot be used.
        """
        self.port = await self._http.listen(host, port)
        log.info(
            "listening on %s:%d", host, self.port, extra={"event": "listening", "port": self.port}
        )
        return self.port

    def stop(self) -> None:
        """Have `run` end."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._stop.wait()

    async def _drain(self) -> None:
        """Accept nobody new; requests in hand may end, for a while."""
        self._state.draining = True
        await self._http.stop_listening()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_timeout_s
        while self._proxy.in_hand and loop.time() < deadline:  # noqa: ASYNC110 - bounded, rare
            await asyncio.sleep(_DRAIN_LOOK_S)
        if self._proxy.in_hand:
            log.warning("%d requests are cut off", self._proxy.in_hand)
            self._proxy.cut_off()


def create_app(
    settings: RouterSettings,
    ledger: Ledger,
    *,
    upstream_key: str | None = None,
    api_key: str | None = None,
    trainer: Trainer | None = None,
) -> Router:
    """A router; see `Router`. Call it in a running event loop.

    Raises:
        SpoolUnusable: its spool cannot be written, or another router has it.
    """
    return Router(settings, ledger, upstream_key=upstream_key, api_key=api_key, trainer=trainer)
