"""Serves one version: copy, verify, load, probe, ack. An ack is written only for what was seen.

The four conditions of an ack (I4): (a) the bytes on this disk are the published ones, (b) the
engine lists the name with our path, (c) a probe under the name gave finite values that agree with
the first replica's, (d) the incarnation before and after is the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from policyline.ledger.errors import ManifestInvalid, ProbeDisagrees
from policyline.ledger.manifest import FileEntry, Manifest
from policyline.ledger.store import Ledger
from policyline.single_flight import SingleFlight
from policyline.storage import Storage
from policyline.watcher.cache import Cache, Fetched
from policyline.watcher.core.model import Applied, Known, Outcome, Retry, Version
from policyline.watcher.core.probe_notes import notes_on
from policyline.watcher.membership import ReplicaMembership
from policyline.watcher.metrics import SidecarMetrics
from policyline.watcher.settings import SidecarSettings
from policyline.watcher.status import SidecarStatus
from policyline.watcher.threads import in_daemon_thread
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import (
    AdapterRefused,
    EngineError,
    EngineFault,
    EngineHangs,
    EngineTimeout,
)
from policyline.watcher.vllm.loading import load, read_manifest, see
from policyline.watcher.vllm.worker_slots import WorkerSlots

log = logging.getLogger(__name__)

T = TypeVar("T")

_REPORT_FETCHED_S: Final = 0.5
"""A load that takes longer is worth an event of its own that it has begun with verified bytes."""


class VersionLoader:
    """Brings versions into service, one step of one version at a time.

    Args:
        settings: of the sidecar.
        membership: this replica in the ledger.
        ledger: records what was done.
        storage: holds the versions' bytes.
        engine: loads them.
        cache: local copies.
        worker_slots: learns ids at loads.
        status: shows what is suspicious about a probe.
        metrics: counts.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        *,
        membership: ReplicaMembership,
        ledger: Ledger,
        storage: Storage,
        engine: EngineClient,
        cache: Cache,
        worker_slots: WorkerSlots,
        status: SidecarStatus,
        metrics: SidecarMetrics,
    ) -> None:
        self._worker_slots = worker_slots
        self._status = status
        self._settings = settings
        self._membership = membership
        self._ledger = ledger
        self._storage = storage
        self._engine = engine
        self._cache = cache
        self._metrics = metrics
        self._fetches: SingleFlight[int, Fetched] = SingleFlight()
        self._phases: dict[int, dict[str, float]] = {}
        self._unreported: set[int] = set()
        """Fetched versions of which the ledger has not heard yet."""
        self._mismatched: set[int] = set()

    def noticed(self, version: int, after_s: float) -> None:
        """Record the time from the wake to the first step for a version; the first call counts."""
        self._phase(version).setdefault("notice", after_s)

    def forget(self, versions: Mapping[int, object]) -> None:
        """Drop what is remembered about other versions than these."""
        self._phases = {n: p for n, p in self._phases.items() if n in versions}
        self._unreported &= versions.keys()
        self._mismatched &= versions.keys()
        self._status.notes = {n: notes for n, notes in self._status.notes.items() if n in versions}

    def _phase(self, version: int) -> dict[str, float]:
        return self._phases.setdefault(version, {})

    def prefetch(self, target: Version) -> None:
        """Begin the copy of a version that will be fetched next, while others are still asked."""
        try:
            entries = self._manifest(target).files
        except ManifestInvalid:
            return  # `fetch` reports it
        self._fetches.start(target.version, self._copy(target, entries))

    async def fetch(self, target: Version) -> Outcome:
        """Copy a version to the local disk and verify it; the ledger records it at its load."""
        copy = self._copy(target, self._manifest(target).files)
        limit_s = self._settings.fetch_timeout_s
        try:
            done = await self._fetches.join(target.version, copy, timeout_s=limit_s)
        except TimeoutError:
            return Retry(f"its copy takes longer than {limit_s:g} s")
        self._note_copy(target, done)
        return Applied()

    def _note_copy(self, target: Version, done: Fetched) -> None:
        self._phase(target.version).update(fetch=done.fetch_s, verify=done.verify_s)
        # an acked version keeps its ack: the fetch is reported at its next load
        self._unreported.add(target.version)

    def _copy(
        self, target: Version, entries: Sequence[FileEntry]
    ) -> Callable[[], Awaitable[Fetched]]:
        def work() -> Fetched:
            return self._cache.fetch(self._storage, target.name, entries, target.copy_name)

        return lambda: in_daemon_thread(work, f"fetch-{target.version}")

    def _manifest(self, target: Version) -> Manifest:
        return read_manifest(
            target.manifest,
            name=target.name,
            digest=target.digest,
            max_size_bytes=self._settings.max_size_bytes,
        )

    async def load(self, target: Version, observed: Known) -> Outcome:
        """Load the local copy, probe it and ack it."""
        if not await self._verified(target):
            return Retry("the local copy was damaged")
        await self._prepare_load(observed)
        started = time.perf_counter()
        try:
            answered = await self._load(target, observed)
        except EngineError as error:
            await self._report_fetched(target)
            if isinstance(error, (AdapterRefused, EngineFault)):
                await self._worker_slots.after_load(target.version)
            raise
        self._phase(target.version)["load"] = time.perf_counter() - started
        try:
            return await self._probe_and_ack(target, observed, broke=not answered)
        finally:
            # nobody waits for it, as for the ack
            await self._worker_slots.after_load(target.version)

    async def _load(self, target: Version, observed: Known) -> bool:
        """Whether the engine answered. A slow load is preceded by the fetched event.

        A quick load's ack records the fetch in the same append.
        """
        loading = asyncio.create_task(load(self._engine, target.name, observed.path(target)))
        try:
            await asyncio.wait([loading], timeout=_REPORT_FETCHED_S)
            if not loading.done():
                await self._report_fetched(target)
            return await self._unless_it_hangs(loading, "a load")
        finally:
            loading.cancel()

    async def _unless_it_hangs(self, task: asyncio.Task[T], what: str) -> T:
        """Wait for a call during which the engine may stop serving everybody.

        vLLM 0.32 loads between two steps, so that a load without an end is a hang. The loop does
        nothing else meanwhile, so the engine is observed here.

        Raises:
            EngineHangs: it did no step for the time after which a probe would report it.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        stepped, since_s = "", loop.time()
        try:
            while True:
                await asyncio.wait(
                    [task], timeout=min(settings.poll_interval_s, settings.probe_timeout_s)
                )
                if task.done():
                    return await task
                seen = await self._stepped()
                if seen not in {None, stepped}:
                    stepped, since_s = seen or "", loop.time()
                elif loop.time() - since_s >= settings.probe_timeout_s:
                    waited = f"no answer to {what} and no step within {loop.time() - since_s:.0f} s"
                    raise EngineHangs(waited)
        finally:
            task.cancel()

    async def _stepped(self) -> str | None:
        """What changes with each step of the engine; None when its server is silent too."""
        try:
            return (await self._engine.snapshot()).stepped
        except EngineTimeout:
            return None

    async def _prepare_load(self, observed: Known) -> None:
        """What can be learnt only before a load: ids in use, and the base model's own probe."""
        await self._worker_slots.before_load(observed.incarnation)
        if self._membership.base_probe is None and not observed.adapters and not observed.busy:
            await self._membership.prove_alive()

    async def ack(self, target: Version, observed: Known) -> Outcome:
        """Verify, probe and ack what the engine holds already."""
        if not await self._verified(target):
            return Retry("the local copy was damaged")
        return await self._probe_and_ack(target, observed)

    async def verify(self, target: Version) -> Outcome:
        """Hash the copy; a damaged one is not local any more and so fetched again."""
        if not await self._verified(target):
            log.warning(
                "the copy of %s is damaged",
                target.name,
                extra={"event": "copy_damaged", "version": target.version},
            )
        return Applied()

    async def _verified(self, target: Version) -> bool:
        # its files can be there a moment before its thread has finished
        begun_before = await self._fetches.take(target.version)
        if begun_before is not None:
            self._note_copy(target, begun_before)
        if self._cache.is_verified(target.copy_name):
            return True
        files = self._manifest(target).files
        started = time.perf_counter()
        right = await asyncio.to_thread(self._cache.verify, target.copy_name, files)
        self._phase(target.version)["verify"] = time.perf_counter() - started
        return right

    async def _report_fetched(self, target: Version) -> None:
        if target.version in self._unreported:
            member = self._membership.member
            await asyncio.to_thread(self._ledger.fetched, member, target.version, target.digest)
            self._unreported.discard(target.version)

    async def _probe_and_ack(
        self, target: Version, observed: Known, *, broke: bool = False
    ) -> Outcome:
        """See (b), (c) and (d) of I4, then ack.

        Args:
            target: the version; (a) was checked before.
            observed: the observation before the load.
            broke: the engine did not answer the load.
        """
        seeing = asyncio.create_task(see(self._engine, target.name, observed.path(target)))
        seen = await self._unless_it_hangs(seeing, "a probe")
        if seen is None:
            return Retry("the engine does not list it with our path", broke=broke)
        self._phase(target.version)["probe"] = seen.probe_s
        incarnation = await self._engine.incarnation()
        if incarnation != observed.incarnation:
            return Retry("the engine became another incarnation meanwhile", broke=True)
        phases = self._phase(target.version)
        try:
            await asyncio.to_thread(
                self._ledger.ack,
                self._membership.member,
                target.version,
                digest=target.digest,
                incarnation=incarnation,
                build=self._membership.build,
                probe=seen.probe,
                tolerance=self._settings.probe_tolerance,
                fetched=target.version in self._unreported,
                notes=self._notes(target, seen.probe),
                phases=phases,
            )
        except ProbeDisagrees as refusal:
            return await self._mismatch(target, refusal)
        del self._phases[target.version]
        self._unreported.discard(target.version)
        self._mismatched.discard(target.version)
        self._metrics.acked(phases)
        log.info(
            "%s is acked",
            target.name,
            extra={"event": "acked", "version": target.version, "phases": phases},
        )
        return Applied()

    def _notes(self, target: Version, probe: Sequence[float]) -> tuple[str, ...]:
        """What is odd about a probe: warned about, never a reason to withhold the ack."""
        notes = notes_on(
            probe,
            self._membership.base_probe,
            self._manifest(target).metadata,
            tolerance=self._settings.reference_tolerance,
        )
        if notes:
            self._metrics.suspicious_probes.inc()
        for note in notes:
            log.warning(
                "%s: %s",
                target.name,
                note,
                extra={"event": "suspicious_probe", "version": target.version, "cause": note},
            )
        self._status.notes[target.version] = notes
        return notes

    async def _mismatch(self, target: Version, refusal: ProbeDisagrees) -> Outcome:
        """Withhold the ack. Noise under load passes, wrong weights do not: so try again."""
        if target.version not in self._mismatched:
            self._mismatched.add(target.version)
            await asyncio.to_thread(
                self._ledger.probe_mismatch,
                self._membership.member,
                target.version,
                digest=target.digest,
                reference=refusal.reference,
                difference=refusal.difference,
            )
        return Retry(str(refusal))
