"""The sidecar: joins the fleet, reconciles at each wake-up, leaves before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from policyline.http_server import HttpServer
from policyline.ledger.errors import LedgerError, LedgerUnavailable, StaleGeneration
from policyline.ledger.store import Ledger
from policyline.storage import Storage
from policyline.watcher.background import (
    LivenessMonitor,
    beat_for_ever,
    wait_for,
    watch_engine,
)
from policyline.watcher.cache import Cache
from policyline.watcher.core.back_off import next_delay_s
from policyline.watcher.core.model import Known, Unknown
from policyline.watcher.errors import (
    EngineRefusesUs,
    LedgerReplaced,
    ReplicaTakenOver,
    WatcherError,
)
from policyline.watcher.execute import Executor
from policyline.watcher.load_version import VersionLoader
from policyline.watcher.membership import ReplicaMembership
from policyline.watcher.metrics import SidecarMetrics
from policyline.watcher.observe import Observer, can_honour, cause_of
from policyline.watcher.reconcile import Reconciler
from policyline.watcher.settings import SidecarSettings
from policyline.watcher.status import SidecarStatus, StatusPages
from policyline.watcher.threads import in_daemon_thread
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError, EngineUnauthorized
from policyline.watcher.vllm.worker_slots import WorkerSlots

log = logging.getLogger(__name__)


_STATUS_CLOSE_S: Final = 0.1
"""For answers under way when the sidecar ends."""
_LOG_AGAIN_S: Final = 30.0
"""Between two lines in the log that an engine is still awaited."""


class Sidecar:
    """Makes one vLLM server serve what the ledger desires. Use it once, from one event loop.

    Args:
        settings: durations, names, paths.
        ledger: open; it stays open.
        storage: where versions are.
        engine: the vLLM server; it stays open.
    """

    def __init__(
        self, settings: SidecarSettings, ledger: Ledger, storage: Storage, engine: EngineClient
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._engine = engine
        self._cache = Cache(settings.cache, ledger.ledger_id, settings.cache_limit_bytes)
        self._status = SidecarStatus(settings.line, settings.replica, ledger_id=ledger.ledger_id)
        self._metrics = SidecarMetrics()
        line, replica = settings.line, settings.replica
        self._membership = ReplicaMembership(
            ledger, engine, line=line, replica=replica, url=settings.advertise
        )
        worker_slots = WorkerSlots(engine)
        self._observer = Observer(
            ledger, engine, self._cache, worker_slots, line=line, replica=replica
        )
        self._liveness = LivenessMonitor(settings, ledger, self._now)
        loader = VersionLoader(
            settings,
            membership=self._membership,
            ledger=ledger,
            storage=storage,
            engine=engine,
            cache=self._cache,
            worker_slots=worker_slots,
            status=self._status,
            metrics=self._metrics,
        )
        self._reconciler = Reconciler(
            settings,
            membership=self._membership,
            observer=self._observer,
            executor=Executor(
                loader,
                membership=self._membership,
                ledger=ledger,
                engine=engine,
                cache=self._cache,
                worker_slots=worker_slots,
                metrics=self._metrics,
                probe_timeout_s=settings.probe_timeout_s,
            ),
            loader=loader,
            cache=self._cache,
            status=self._status,
            metrics=self._metrics,
            now=self._now,
        )
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()
        self._woken_at_s: float | None = None
        self._engine_changed = False
        self._engine_seen = asyncio.Event()
        self.port: int | None = None
        """Where the status server listens; None until it does."""

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Leave the fleet, finish the action in hand, and have `run` return."""
        self._reconciler.stopping = True
        self._stop.set()
        self._wake.set()

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            WatcherError: the sidecar cannot work, or not any more; see `policyline.watcher.errors`.
            LedgerError: the ledger refused for good.
        """
        self._cache.open()
        self._observer.find_stale_caches()
        settings = self._settings
        pages = StatusPages(self._status, self._metrics, self._now)
        server = HttpServer(pages.handle, shutdown_timeout_s=_STATUS_CLOSE_S)
        try:
            self._status.reconciled_at_s = self._now()
            self.port = await server.listen(settings.listen_host, settings.listen_port)
            log.info(
                "status on http://%s:%d/status",
                settings.listen_host,
                self.port,
                extra={"event": "listening", "port": self.port},
            )
            if await self._reach_engine() and await self._replica_is_free():
                await self._membership.check_slots()
                await self._join()
                await self._work()
        except (WatcherError, LedgerError) as error:
            await self._leave_after(error)
            raise
        finally:
            self._cache.close()
            await server.close()

    async def _replica_is_free(self) -> bool:
        """Refuse to replace a running sidecar; False when stopped meanwhile.

        Two that serve one replica by mistake, or one engine under two names, would take its
        versions from each other. Only its heartbeat shows whether one on another host is dead.

        Raises:
            ReplicaInUse, EngineInUse: its heartbeat moves.
        """
        holders = await self._membership.holders(replace=self._settings.replace)
        if not holders:
            return True
        seen = await self._membership.heartbeats()
        until_s = self._now() + 2 * self._settings.heartbeat_s
        for holder in holders.values():
            log.info("%s; looking for its heartbeat", holder, extra={"event": "replica_in_use"})
        while not self._stop.is_set() and self._now() < until_s:
            await wait_for(self._stop, self._settings.heartbeat_s / 4)
            heartbeats = await self._membership.heartbeats()
            for replica, holder in holders.items():
                if heartbeats.get(replica) != seen.get(replica):
                    raise holder
        return not self._stop.is_set()

    async def _leave_after(self, error: WatcherError | LedgerError) -> None:
        """Nobody watches this replica any more, so nobody should count on it or wait for it."""
        if not self._membership.has_joined or isinstance(error, (ReplicaTakenOver, LedgerReplaced)):
            return
        try:
            async with asyncio.timeout(self._settings.stop_timeout_s):
                await self._membership.leave(f"ended: {error}")
        except (LedgerError, TimeoutError) as failure:
            log.warning("could not leave the fleet: %s", failure, extra={"event": "leave_failed"})

    async def _reach_engine(self) -> bool:
        """Wait until the engine answers, as it may be starting; False when stopped before."""
        attempts = 0
        begun_s = logged_s = self._now()
        while not self._stop.is_set():
            try:
                await self._membership.meet_engine()
                await self._membership.prove_alive()
            except EngineUnauthorized as error:
                raise EngineRefusesUs(self._engine.base_url) from error
            except EngineError as error:
                if attempts == 0 or self._now() - logged_s >= _LOG_AGAIN_S:
                    logged_s = self._now()
                    log.warning(
                        "waiting for vLLM at %s (for %.0f s): %s",
                        self._engine.base_url,
                        logged_s - begun_s,
                        cause_of(error),
                        extra={"event": "waiting_for_engine"},
                    )
                attempts += 1
                self._status.observed = Unknown(cause_of(error))
                self._status.reconciled_at_s = self._now()
                delay_s = next_delay_s(attempts, 0.5, self._settings.poll_interval_s)
                await wait_for(self._stop, delay_s)
            else:
                return True
        return False

    async def _join(self) -> None:
        """Join so that no ack counts that the engine cannot honour (I2).

        While this watcher was down somebody may have unloaded what it had acked. Then it joins
        without an incarnation, takes those acks back, and only then announces the incarnation.
        """
        settings = self._settings
        rows = await asyncio.to_thread(self._ledger.residency, settings.line)
        acked = {
            r.version: r.incarnation
            for r in rows
            if r.replica == settings.replica and r.state == "acked"
        }
        self._observer.ask_about(frozenset(acked))
        observation = await self._observer.observe()
        incarnation = (
            observation.observed.incarnation if isinstance(observation.observed, Known) else None
        )
        if incarnation is not None and not can_honour(observation, acked, incarnation):
            incarnation = None
        await self._membership.join(incarnation)
        self._status.generation = self._membership.member.generation

    async def _work(self) -> None:
        """Run everything until `stop`, or until a part of it fails."""
        loop = asyncio.get_running_loop()
        # not for what leaves our desired set as it is: in a fleet of 64, each version would wake
        # each sidecar two hundred times; the reconcile loop polls by itself
        follower = self._ledger.follow(poll_s=None, details=False)

        def wake_at_signals() -> None:
            for _ in follower:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody to wake
                    loop.call_soon_threadsafe(self._wake_for_ledger)

        in_daemon_thread(wake_at_signals, "ledger-signals")
        reconciling = asyncio.create_task(self._reconcile_for_ever(), name="loop")
        beating = beat_for_ever(self._membership, self._settings.heartbeat_s, self._wake_for_ledger)
        background = [
            asyncio.create_task(beating, name="heartbeat"),
            asyncio.create_task(self._liveness.run_for_ever(), name="observer"),
            asyncio.create_task(
                watch_engine(self._engine, self._engine_seen, self._wake_for_engine),
                name="engine-socket",
            ),
        ]
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        tasks = [reconciling, *background, stopping]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                await self._leave(reconciling)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            follower.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, reconciling: asyncio.Task[None]) -> None:
        """Leave the fleet first, so that no request comes; then let the action in hand finish."""
        self._status.leaving = True
        try:
            async with asyncio.timeout(self._settings.stop_timeout_s):
                with contextlib.suppress(LedgerUnavailable):
                    await self._membership.leave("stopped")
                log.info("left", extra={"event": "left", "replica": self._settings.replica})
                await asyncio.wait([reconciling])
        except TimeoutError:
            log.warning(
                "stopped with an action in hand after %g s",
                self._settings.stop_timeout_s,
                extra={"event": "stop_timeout"},
            )

    async def _reconcile_for_ever(self) -> None:
        wake_at_s: float | None = self._now()
        while not self._stop.is_set():
            if wake_at_s is not None:
                await wait_for(self._wake, wake_at_s - self._now())
            # clear before the read: what is committed after it wakes us again
            self._wake.clear()
            woken_at_s, self._woken_at_s = self._woken_at_s or self._now(), None
            due = wake_at_s is not None and self._now() >= wake_at_s
            fully, self._engine_changed = due or self._engine_changed, False
            try:
                wake_at_s = await self._reconcile(woken_at_s, fully)
            except StaleGeneration as refusal:
                if not self._stop.is_set():
                    wake_at_s = await self._rejoin(refusal)

    async def _reconcile(self, woken_at_s: float, fully: bool) -> float | None:  # noqa: FBT001 - not an option
        wake_at_s = await self._reconciler.reconcile(woken_at_s, fully=fully)
        if self._reconciler.view is not None:
            self._liveness.see(self._reconciler.view)
        if isinstance(self._status.observed, Known):
            self._engine_seen.set()
        return wake_at_s

    async def _rejoin(self, refusal: StaleGeneration) -> float:
        """Join again if others declared this watcher lost; return when to reconcile again."""
        try:
            if await self._membership.must_rejoin():
                log.warning("joining again: %s", refusal, extra={"event": "rejoining"})
                await self._join()
        except LedgerUnavailable as error:
            log.warning("ledger unreachable: %s", error, extra={"event": "ledger_unreachable"})
            return self._now() + self._settings.poll_interval_s
        return self._now()

    def _wake_for_ledger(self) -> None:
        if self._woken_at_s is None:
            self._woken_at_s = self._now()
        self._wake.set()

    def _wake_for_engine(self) -> None:
        self._engine_changed = True
        self._wake_for_ledger()
