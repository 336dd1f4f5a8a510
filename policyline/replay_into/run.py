"""Replays a run's versions one after another; can stop between two and go on later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from policyline.ledger import Ledger
from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import Manifest
from policyline.ledger.rows import VersionRow
from policyline.replay_into.admission import admit, asked, refuse_names_in_use, unload_command
from policyline.replay_into.errors import BuildChanged, CacheUnseen, ServerGone
from policyline.replay_into.model import Outcome, Replayed, judge
from policyline.replay_into.records import (
    name_of,
    published_versions,
    recorded_probes,
    was_refused,
)
from policyline.replay_into.settings import ReplaySettings
from policyline.replay_into.slot import EngineInterrupted, ReplaySlot
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
"""Two interruptions with the same version are not taken for chance."""
_POLL_S: Final = 0.5
_UNSEEN: Final = frozenset({"files_missing", "not_a_directory"})
"""Refusals whose cause is the engine's view of our disk, not the adapter."""
_WRONG_BYTES: Final = (ManifestInvalid, ContentMismatch, FileMissing, UnsafePath)


class _Stopped(Exception):
    """`stop` was called."""


class Replay:
    """One replay: `run` it once; `stop` ends it after the current step.

    Args:
        settings: what is replayed, and how.
        ledger: only read.
        storage: holds the versions' bytes.
        engine: the server.
        cache: opened; local copies that the server reads.
        state: the progress.
        on_result: called with each result, its position from 1, and the number of versions.
        on_message: called with a line of text when the replay waits or leaves something behind.
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
        on_result: Callable[[Replayed, int, int], None],
        on_message: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._storage = storage
        self._engine = engine
        self._cache = cache
        self._state = state
        self._on_result = on_result
        self._on_message = on_message
        self._stopping = asyncio.Event()
        self._build = ""
        self._slot = ReplaySlot(engine, cache, state)

    def stop(self) -> None:
        """End after the current step."""
        self._stopping.set()

    async def run(self) -> list[Replayed]:
        """Replay; return the results by version. When stopped, those until then.

        Raises:
            ReplayError, LedgerError, StorageError, WatcherError: it cannot go on. The results are
                in the state file, and nothing stays loaded on a server that answers.
        """
        run = await asyncio.to_thread(self._ledger.run, self._settings.run)
        rows = await asyncio.to_thread(
            published_versions, self._ledger, run, self._settings.versions
        )
        await self._prepare(rows)
        try:
            return await self._all(rows)
        finally:
            await self._clean_up()

    async def _all(self, rows: list[VersionRow]) -> list[Replayed]:
        results: list[Replayed] = []
        with contextlib.suppress(_Stopped):
            for number, row in enumerate(rows, 1):
                if self._stopping.is_set():
                    break
                result = self._state.done.get(row.version)
                if result is None:
                    result = await self._replay(row)
                    self._state.finish(result)
                results.append(result)
                self._on_result(result, number, len(rows))
        return results

    async def _clean_up(self) -> None:
        """Unload and delete what is left; report what could not be."""
        try:
            await self._slot.unload()
        except EngineError as error:
            loaded = self._state.loaded
            if loaded is not None:
                command = unload_command(self._engine.base_url, loaded.name)
                self._on_message(f"{loaded.name} may still be loaded ({error}); unload: {command}")
        await self._slot.tidy()
        for directory in self._slot.undeleted:
            self._on_message(f"not deleted, the engine may still read it: {directory}")

    async def _prepare(self, rows: list[VersionRow]) -> None:
        """Check that the server can be used and serves none of the names."""
        info = await admit(self._engine, self._ledger, rows[0].line)
        self._build = info.build
        subject = Subject(
            self._ledger.ledger_id, self._settings.run, self._engine.base_url, build=info.build
        )
        self._state.open(subject)
        self._slot.frees_memory = info.dev_endpoints
        await asked(self._engine, self._slot.unload_interrupted())
        done = self._state.done
        await refuse_names_in_use(
            self._engine, {name_of(row) for row in rows if row.version not in done}
        )

    async def _replay(self, row: VersionRow) -> Replayed:
        if row.collected:
            return _result(row, "collected", "its bytes were collected")
        phases: dict[str, float] = {}
        try:
            manifest = read_manifest(
                row.manifest or "",
                name=name_of(row),
                digest=row.digest or "",
                max_size_bytes=self._settings.max_size_bytes,
            )
            made = await self._fetch(row, manifest, phases)
        except _WRONG_BYTES as error:
            return _result(row, "failed", str(error))
        try:
            return await self._serve(row, phases)
        finally:
            if made:
                self._slot.discard(name_of(row), _copy_name(row))
            await self._slot.tidy()

    async def _fetch(self, row: VersionRow, manifest: Manifest, phases: dict[str, float]) -> bool:
        """Make sure of a verified local copy; return whether it was made now."""
        copy = _copy_name(row)

        def work() -> bool:
            if copy in self._cache.local() and self._cache.verify(copy, manifest.files):
                return False
            done = self._cache.fetch(self._storage, name_of(row), manifest.files, copy)
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
        """Check it on the server; once more when the engine was interrupted."""
        cause = ""
        for _ in range(_ATTEMPTS):
            try:
                return await self._serve_once(row, phases)
            except (EngineInterrupted, EngineError) as error:
                cause = str(error)
            await self._wait_for_engine(name_of(row), cause)
        return _result(row, "failed", f"{_ATTEMPTS} times: {cause}", phases)

    async def _serve_once(self, row: VersionRow, phases: dict[str, float]) -> Replayed:
        incarnation = await self._engine.incarnation()
        try:
            seen, load_s = await self._slot.check(name_of(row), _copy_name(row), incarnation)
        except (AdapterRefused, NonFinite) as error:
            return await self._refused(row, error, phases)
        finally:
            await self._slot.unload()
        phases.update(load=load_s, probe=seen.probe_s)
        recorded = await asyncio.to_thread(recorded_probes, self._ledger, row)
        outcome, difference, reference = judge(
            seen.probe, recorded, self._build, self._settings.tolerance
        )
        result = _result(row, outcome, "", phases)
        if reference is None:
            return result
        return replace(
            result, difference=difference, replica=reference.replica, build=reference.build
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

    async def _wait_for_engine(self, name: str, cause: str) -> None:
        """Wait until the server answers again and nothing of this replay is loaded on it."""
        self._on_message(f"{name}: {cause}; waiting for {self._engine.base_url}")
        deadline = asyncio.get_running_loop().time() + self._settings.engine_back_s
        while True:
            try:
                info = await self._engine.info()
                await self._slot.unload_interrupted()
            except EngineError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise ServerGone(
                        f"{self._engine.base_url} did not answer within "
                        f"{self._settings.engine_back_s:g} s: {error}",
                        hint="start it, and run again with the same --state",
                    ) from error
                await self._pause()
                continue
            if info.build != self._build:
                raise BuildChanged(
                    f"{self._engine.base_url} is {info.build} now, it was {self._build}",
                    hint="start again with another --state",
                )
            return

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._stopping.wait()
        if self._stopping.is_set():
            raise _Stopped

    async def _unless_stopped(self, work: asyncio.Future[T]) -> T:
        """Await the work, but end at once when stopped: nothing is loaded yet."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        waits: set[asyncio.Future[Any]] = {work, stopping}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not work.done():
            raise _Stopped
        return work.result()


def _copy_name(row: VersionRow) -> str:
    return Version(row.version, name_of(row), row.digest or "", role=None).copy_name


def _result(
    row: VersionRow, outcome: Outcome, reason: str, phases: dict[str, float] | None = None
) -> Replayed:
    return Replayed(
        row.version, name_of(row), row.digest or "", outcome, reason, phases=dict(phases or {})
    )
