"""Applies one action and returns its outcome.

Ledger errors pass through: no version is to blame for an unreachable ledger or a fenced watcher.
Everything else that is expected becomes an outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from policyline.ledger.errors import ManifestInvalid, Refused
from policyline.ledger.probe import PROBE_TOKENS
from policyline.ledger.store import Ledger
from policyline.storage import ContentMismatch, StorageError, UnsafePath
from policyline.watcher.cache import Cache
from policyline.watcher.core.model import (
    Ack,
    Action,
    Announce,
    Applied,
    DeleteLocal,
    DeleteOrphans,
    Fetch,
    Free,
    Known,
    Load,
    Observed,
    Outcome,
    Pause,
    Prove,
    Reject,
    Rejected,
    RemoveForeign,
    ReportForeign,
    ReportGone,
    Resume,
    Retry,
    Unload,
    Verify,
    Version,
)
from policyline.watcher.load_version import VersionLoader
from policyline.watcher.membership import ReplicaMembership
from policyline.watcher.metrics import SidecarMetrics
from policyline.watcher.observe import cause_of
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import (
    AdapterMissing,
    AdapterRefused,
    EngineDead,
    EngineError,
    EngineHangs,
    EngineTimeout,
    EngineUnreachable,
    NonFinite,
    RouteMissing,
)
from policyline.watcher.vllm.worker_slots import WorkerSlots

log = logging.getLogger(__name__)

_ALIVE_S: Final = 5.0
"""Longest wait for the scored request that shows a living, unpaused engine before a delete."""
_OUR_DISK: Final = frozenset({"files_missing", "not_a_directory"})
"""Refusals that speak of the engine's view of our disk, not of the adapter."""

_HOPELESS: Final = (AdapterRefused, NonFinite, ContentMismatch, UnsafePath, ManifestInvalid)
_BREAKS: Final = (EngineTimeout, EngineUnreachable, EngineDead)


class Executor:
    """Applies actions, one at a time.

    Args:
        server: brings versions into service.
        membership: this replica in the ledger.
        ledger: records what was done.
        engine: is changed.
        cache: local copies.
        worker_slots: forgets what is freed.
        metrics: counts.
        probe_timeout_s: how long the engine may take to show that it generates.
    """

    def __init__(
        self,
        loader: VersionLoader,
        *,
        membership: ReplicaMembership,
        ledger: Ledger,
        engine: EngineClient,
        cache: Cache,
        worker_slots: WorkerSlots,
        metrics: SidecarMetrics,
        probe_timeout_s: float = 30.0,
    ) -> None:
        self._probe_timeout_s = probe_timeout_s
        self._worker_slots = worker_slots
        self._loader = loader
        self._membership = membership
        self._ledger = ledger
        self._engine = engine
        self._cache = cache
        self._metrics = metrics

    async def apply(self, action: Action, observed: Observed) -> Outcome:
        """Apply one action of a plan that was made from `observed`.

        Raises:
            LedgerUnavailable: the ledger is unreachable; the action may have been done in part.
            StaleGeneration: this watcher does not speak for the replica any more.
            WatcherError: the engine cannot work with this sidecar.
        """
        try:
            if isinstance(action, (Announce, ReportGone, ReportForeign, Reject)):
                await self._report(action)
                return Applied()
            assert isinstance(observed, Known), f"{action} was planned for an unknown engine"
            return await self._change(action, observed)
        except (EngineError, StorageError, Refused, ManifestInvalid, OSError) as error:
            return self._outcome(action, error)

    def _outcome(self, action: Action, error: Exception) -> Outcome:
        """Whether trying again can help."""
        cause, kind = cause_of(error), type(error).__name__
        if isinstance(error, AdapterRefused) and error.reason in _OUR_DISK:
            return Retry(f"{cause}; let vLLM read {self._cache.home}", kind)
        if isinstance(error, _HOPELESS):
            return Rejected(cause, kind)
        if isinstance(error, EngineHangs):
            return Retry(cause, kind, hung=True, broke=True)
        broke = isinstance(error, _BREAKS) and isinstance(action, (Load, Ack))
        return Retry(cause, kind, broke=broke)

    async def _change(self, action: Action, observed: Known) -> Outcome:
        outcome: Outcome = Applied()
        match action:
            case Fetch(target):
                outcome = await self._loader.fetch(target)
            case Load(target):
                outcome = await self._loader.load(target, observed)
            case Ack(target):
                outcome = await self._loader.ack(target, observed)
            case Verify(target):
                outcome = await self._loader.verify(target)
            case DeleteLocal() | DeleteOrphans():
                outcome = await self._clean(action)
            case Prove():
                outcome = await self._prove(observed)
            case Pause() | Resume():
                await self._steer(action)
            case Unload() | Free() | RemoveForeign():
                await self._take_away(action)
        return outcome

    async def _clean(self, action: DeleteLocal | DeleteOrphans) -> Outcome:
        if isinstance(action, DeleteLocal):
            return await self._delete(
                [(target.name, target.copy_name) for target in action.targets]
            )
        outcome = await self._delete([(None, path) for path in action.paths])
        if isinstance(outcome, Applied):
            count = len(action.paths)
            _log("swept", f"deleted {count} copies: {action.why}", paths=list(action.paths))
        return outcome

    # --- recorded in the ledger

    async def _report(self, action: Announce | ReportGone | ReportForeign | Reject) -> None:
        match action:
            case Announce(incarnation, why):
                if incarnation is not None:
                    await self._membership.meet_engine()
                await self._membership.announce(incarnation, why)
                _log("incarnation", f"engine: {why}", incarnation=incarnation)
            case ReportGone(target, why):
                await self._report_evicted(target, why)
                _log("gone", f"{target.name}: {why}", version=target.version)
            case ReportForeign(name, path, why):
                member = self._membership.member
                await asyncio.to_thread(self._ledger.foreign_adapter_seen, member, name, path, why)
                _log("foreign", f"{name} at {path} is foreign: {why}", adapter=name)
            case Reject(target, why):
                await self.report_failed(target, why, permanent=True)

    async def report_failed(self, target: Version, why: str, *, permanent: bool) -> None:
        """Record that a version could not be served; `permanent` rejects it on this replica."""
        await asyncio.to_thread(
            self._ledger.load_failed,
            self._membership.member,
            target.version,
            digest=target.digest,
            reason=why,
            permanent=permanent,
        )
        kind = "rejected" if permanent else "failed"
        log.warning(
            "%s %s: %s",
            target.name,
            kind,
            why,
            extra={"event": kind, "version": target.version, "cause": why},
        )

    async def _report_evicted(self, target: Version, why: str) -> None:
        await asyncio.to_thread(
            self._ledger.evicted,
            self._membership.member,
            target.version,
            digest=target.digest,
            reason=why,
        )

    # --- changed on engine and disk

    async def _take_away(self, action: Unload | Free | RemoveForeign) -> None:
        match action:
            case Unload(target, why):
                await self._unload(target, why)
            case Free(target, adapter_id):
                await self._free(target, adapter_id)
            case RemoveForeign():
                await self._remove(action)

    async def _unload(self, target: Version, why: str) -> None:
        # recorded before the unload, so that the router sends no request to a name that is gone
        # (I2); a rejected version stays rejected, else it would be tried again
        if target.reported not in {"evicted", "rejected"}:
            await self._report_evicted(target, why)
        with contextlib.suppress(AdapterMissing):
            await self._engine.unload(target.name)
        self._metrics.evictions.inc()
        _log("evicted", f"{target.name} is evicted: {why}", version=target.version)

    async def _free(self, target: Version, adapter_id: int) -> None:
        await self._engine.remove_resident(adapter_id)
        self._worker_slots.forget(target.version)
        self._metrics.freed.inc()
        log.debug("freed %s, id %d in the workers", target.name, adapter_id)

    async def _remove(self, action: RemoveForeign) -> None:
        """Unload a foreign adapter, and forget the prefixes computed under its name."""
        with contextlib.suppress(AdapterMissing):
            await self._engine.unload(action.name)
        with contextlib.suppress(RouteMissing):
            await self._engine.reset_prefix_cache()
        _log("foreign_removed", f"{action.name} is removed: {action.why}", adapter=action.name)

    async def _steer(self, action: Pause | Resume) -> None:
        if isinstance(action, Pause):
            await self._engine.pause("keep")
            _log("paused", f"paused: {action.why}")
        else:
            await self._engine.resume()
            _log("resumed", f"resumed: {action.why}")

    async def _prove(self, observed: Known) -> Outcome:
        """Have the base model answer a scored request; a busy engine may show a step instead.

        The base model, because such a request touches no adapter in the engine's caches.
        """
        limit_s = self._probe_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._engine.score(observed.base, PROBE_TOKENS)
        except (TimeoutError, EngineTimeout) as error:
            if (await self._engine.snapshot()).stepped != observed.stepped:
                return Applied()
            cause = f"no answer to a scored request and no step within {limit_s:g} s"
            return Retry(cause, type(error).__name__, hung=True)
        except (EngineDead, EngineUnreachable):
            raise
        except EngineError as error:  # an answer, if not a good one: others judge that
            log.debug("the scored request was answered with %s", cause_of(error))
        return Applied()

    async def _delete(self, targets: Sequence[tuple[str | None, str]]) -> Outcome:
        """Delete copies once a living engine shows no request on any of them.

        A frozen or paused engine shows none either: only an answered request makes vLLM 0.32
        renew `lora_requests_info`. With no name given, only an engine without any request will
        do: another ledger's adapters may have any name.

        Args:
            targets: (name under which the engine served it, copy name or absolute path).
        """
        base = (await self._engine.models()).base.name
        try:
            async with asyncio.timeout(_ALIVE_S):
                await self._engine.score(base, PROBE_TOKENS)
        except TimeoutError:
            return Retry(f"the engine did not answer within {_ALIVE_S:g} s")
        snapshot = await self._engine.snapshot()
        if snapshot.busy is None:
            return Retry("the engine does not report which files it may need")
        listed = [(a.name, f"{a.path}/") for a in snapshot.models.adapters]
        needed = {name for name, _ in listed} | snapshot.busy
        for name, copy_name in targets:
            path = f"{Path(self._cache.home, copy_name)}/"
            in_use = any(listed_path.startswith(path) for _, listed_path in listed)
            if in_use or (name in needed if name is not None else snapshot.busy):
                return Retry("the engine may still need the files")
        for _, copy_name in targets:
            await asyncio.to_thread(self._cache.delete, copy_name)
            log.debug("deleted the local copy %s", copy_name)
        return Applied()


def _log(event: str, message: str, **fields: object) -> None:
    log.info(message, extra={"event": event, **fields})
