"""The replay of a run's versions, one after another; stops between two, and goes on later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from policyline.ledger import Ledger
from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import Manifest
from policyline.ledger.rows import VersionRow
from policyline.replay_into.admission import admit, asked, refuse_held, unload_by_hand
from policyline.replay_into.errors import BuildChanged, CacheUnseen, ServerGone
from policyline.replay_into.model import Outcome, Replayed, judge
from policyline.replay_into.records import (
    name_of,
    published_versions,
    recorded_probes,
    was_refused,
)
from policyline.replay_into.settings import ReplaySettings
from policyline.replay_into.stand import Broke, Stand
from policyline.replay_into.state import StateFile, Subject
from policyline.storage import ContentMismatch, FileMissing, Storage, UnsafePath
from policyline.watcher.cache import Cache
from policyline.watcher.core.model import Version
from policyline.watcher.errors import CacheUnusable
from policyline.watcher.threads import in_daemon_thread
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterRefused, EngineError, NonFinite
from policyline.watcher.vllm.loading import read_manifest

T = TypeVar("T")

_ATTEMPTS: Final = 2
"""An engine that breaks off twice with one version is not blamed on chance."""
_LOOK_AGAIN_S: Final = 0.5
_UNSEEN: Final = frozenset({"files_missing", "not_a_directory"})
"""Refusals that speak of the engine's view of our disk, not of the adapter."""
_WRONG_BYTES: Final = (ManifestInvalid, ContentMismatch, FileMissing, UnsafePath)


class _Stopped(Exception):
    """Somebody wants an end."""


class Replay:
    """One replay. `run` it once; `stop` ends it after the step in hand.

    Args:
        settings: what and how.
        ledger: only read.
        storage: holds the bytes.
        engine: the server.
        cache: opened; local copies that the server reads.
        state: what is done.
        report: hears each result, with its position and their number.
        tell: hears what is waited for.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        *,
        ledger: Ledger,
        storage: Storage,
        engine: EngineClient,
        cache: Cache,
        state: StateFile,
        report: Callable[[Replayed, int, int], None],
        tell: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._storage = storage
        self._engine = engine
        self._cache = cache
        self._state = state
        self._report = report
        self._tell = tell
        self._stopping = asyncio.Event()
        self._build = ""
        self._stand = Stand(engine, cache, state, frees_memory=False)

    def stop(self) -> None:
        """End after the step in hand."""
        self._stopping.set()

    @property
    def is_stopped(self) -> bool:
        """Whether somebody wanted an end."""
        return self._stopping.is_set()

    async def run(self) -> list[Replayed]:
        """Replay; return what was done, by version. When stopped, what was done until then.

        Raises:
            ReplayError, LedgerError, StorageError, WatcherError: it cannot go on; what is done is
                in the state file, and nothing of ours stays on a server that answers.
        """
        run = await asyncio.to_thread(self._ledger.run, self._settings.run)
        rows = await asyncio.to_thread(
            published_versions, self._ledger, run, self._settings.versions
        )
        await self._meet(rows)
        try:
            return await self._all(rows)
        finally:
            await self._leave()

    async def _all(self, rows: list[VersionRow]) -> list[Replayed]:
        results: list[Replayed] = []
        with contextlib.suppress(_Stopped):
            for number, row in enumerate(rows, 1):
                if self.is_stopped:
                    break
                result = self._state.progress.done.get(row.version)
                if result is None:
                    result = await self._replay(row)
                    self._state.finish(result)
                results.append(result)
                self._report(result, number, len(rows))
        return results

    async def _leave(self) -> None:
        """Take off what is still on the server, and say what could not be."""
        try:
            await self._stand.take_off()
        except EngineError as error:
            held = self._state.progress.held
            if held is not None:
                by_hand = unload_by_hand(self._engine.base_url, held.name)
                self._tell(f"{held.name} may still be loaded ({error}); take it off: {by_hand}")
        await self._stand.tidy()
        for directory in self._stand.kept:
            self._tell(f"left for the engine, which may still read it: {directory}")

    async def _meet(self, rows: list[VersionRow]) -> None:
        """Make sure that the server can be used, and holds none of the names."""
        info = await admit(self._engine, self._ledger, rows[0].line)
        self._build = info.build
        subject = Subject(
            self._ledger.ledger_id, self._settings.run, self._engine.base_url, build=info.build
        )
        self._state.open(subject)
        self._stand = Stand(self._engine, self._cache, self._state, frees_memory=info.dev_endpoints)
        await asked(self._engine, self._stand.take_off_leftover())
        done = self._state.progress.done
        await refuse_held(self._engine, {name_of(row) for row in rows if row.version not in done})

    async def _replay(self, row: VersionRow) -> Replayed:
        if row.collected:
            return _result(row, "collected", "its bytes were collected")
        phases: dict[str, float] = {}
        try:
            manifest = self._manifest(row)
            made = await self._fetch(row, manifest, phases)
        except _WRONG_BYTES as error:
            return _result(row, "failed", str(error))
        try:
            return await self._serve(row, phases)
        finally:
            if made:
                self._stand.discard(name_of(row), _place(row))
            await self._stand.tidy()

    def _manifest(self, row: VersionRow) -> Manifest:
        return read_manifest(
            row.manifest or "",
            name=name_of(row),
            digest=row.digest or "",
            max_size_bytes=self._settings.max_size_bytes,
        )

    async def _fetch(self, row: VersionRow, manifest: Manifest, phases: dict[str, float]) -> bool:
        """Have a verified local copy; whether it was made now."""
        place = _place(row)

        def work() -> bool:
            if place in self._cache.local() and self._cache.verify(place, manifest.files):
                return False
            done = self._cache.fetch(self._storage, name_of(row), manifest.files, place)
            phases.update(fetch=done.fetch_s, verify=done.verify_s)
            return True

        try:
            return await self._unless_stopped(in_daemon_thread(work, "fetch"))
        except OSError as error:
            raise CacheUnusable(
                f"cache {self._cache.home} cannot be used: {error.strerror}",
                hint="make it writable for this user, or choose another --cache",
            ) from error

    async def _serve(self, row: VersionRow, phases: dict[str, float]) -> Replayed:
        """Show it on the server; a second time when the engine broke off."""
        cause = ""
        for _ in range(_ATTEMPTS):
            try:
                return await self._serve_once(row, phases)
            except (Broke, EngineError) as error:
                cause = str(error)
            await self._engine_back(name_of(row), cause)
        return _result(row, "failed", f"{_ATTEMPTS} times: {cause}", phases)

    async def _serve_once(self, row: VersionRow, phases: dict[str, float]) -> Replayed:
        incarnation = await self._engine.incarnation()
        try:
            shown = await self._stand.show(name_of(row), _place(row), incarnation)
        except (AdapterRefused, NonFinite) as error:
            return await self._refused(row, error, phases)
        finally:
            await self._stand.take_off()
        phases.update(load=shown.load_s, probe=shown.seen.probe_s)
        recorded = await asyncio.to_thread(recorded_probes, self._ledger, row)
        verdict = judge(shown.seen.probe, recorded, self._build, self._settings.tolerance)
        reference = verdict.reference
        return Replayed(
            row.version,
            name_of(row),
            row.digest or "",
            verdict.outcome,
            difference=verdict.difference,
            replica=None if reference is None else reference.replica,
            build=None if reference is None else reference.build,
            phases=dict(phases),
        )

    async def _refused(
        self, row: VersionRow, error: AdapterRefused | NonFinite, phases: dict[str, float]
    ) -> Replayed:
        if isinstance(error, AdapterRefused) and error.reason in _UNSEEN:
            raise CacheUnseen(
                f"vLLM at {self._engine.base_url} finds no files in {self._cache.home}",
                hint="choose a --cache on a disk that it sees under the same path",
            )
        before = await asyncio.to_thread(was_refused, self._ledger, row)
        if before is None:
            return _result(row, "failed", str(error), phases)
        return _result(row, "refused_again", f"{error}; recorded: {before}", phases)

    async def _engine_back(self, name: str, cause: str) -> None:
        """Wait until the server answers a request again, and nothing of ours is on it."""
        self._tell(f"{name}: {cause}; waiting for {self._engine.base_url}")
        deadline = asyncio.get_running_loop().time() + self._settings.engine_back_s
        while True:
            try:
                info = await self._engine.info()
                await self._stand.take_off_leftover()
            except EngineError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ServerGone(
                        f"{self._engine.base_url} has not come back within "
                        f"{self._settings.engine_back_s:g} s: {error}",
                        hint="start it, and go on with the same --state",
                    ) from error
                await self._pause()
                continue
            if info.build != self._build:
                raise BuildChanged(
                    f"{self._engine.base_url} is {info.build} now, it was {self._build}",
                    hint="begin anew, with another --state",
                )
            return

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await self._stopping.wait()
        if self.is_stopped:
            raise _Stopped

    async def _unless_stopped(self, work: asyncio.Future[T]) -> T:
        """The result, or an end at once when somebody wants one: nothing is loaded yet."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        waits: set[asyncio.Future[Any]] = {work, stopping}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not work.done():
            raise _Stopped
        return work.result()


def _place(row: VersionRow) -> str:
    return Version(row.version, name_of(row), row.digest or "", role=None).copy_name


def _result(
    row: VersionRow, outcome: Outcome, reason: str, phases: dict[str, float] | None = None
) -> Replayed:
    return Replayed(
        row.version, name_of(row), row.digest or "", outcome, reason, phases=dict(phases or {})
    )
