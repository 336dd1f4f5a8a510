"""Loads one version at a time on a server, probes it, and unloads it again.

Unloads only what it loaded, and deletes only copies that it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

from policyline.ledger.probe import PROBE_TOKENS
from policyline.replay_into.state import LoadedAdapter, StateFile
from policyline.watcher.cache import Cache
from policyline.watcher.observe import is_gone
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterMissing, EngineError, EngineUnreachable
from policyline.watcher.vllm.loading import Seen, load, see

log = logging.getLogger(__name__)

_ALIVE_S: Final = 5.0
"""Longest wait for the request that makes the engine update its busy list."""


class EngineInterrupted(Exception):
    """The engine stopped or restarted while a version was loaded; the cause is not known."""


class ReplaySlot:
    """One adapter slot on a server, for one version at a time.

    Args:
        engine: the server.
        cache: local copies, which the server reads.
        state: records what is loaded, so that a killed replay can unload it later.
    """

    def __init__(self, engine: EngineClient, cache: Cache, state: StateFile) -> None:
        self._engine = engine
        self._cache = cache
        self._state = state
        self.frees_memory = False
        """Whether the server has development routes, which free its workers' memory."""
        self._loaded_ids: frozenset[int] = frozenset()
        self._unneeded: dict[str, str] = {}
        """Name -> directory of copies that this replay made and that are unloaded."""

    async def check(self, name: str, directory: str, incarnation: str) -> tuple[Seen, float]:
        """Load a local copy, check that it is listed, and probe it.

        Args:
            name: the version's policy name.
            directory: of the copy, relative to the cache's home.
            incarnation: of the engine when the check began.

        Returns:
            What was seen, and the seconds that the load call took.

        Raises:
            EngineInterrupted: the engine is another incarnation, or does not list the copy.
            EngineError: as the calls.
        """
        path = f"{self._cache.home}/{directory}"
        before = await self._worker_ids()
        self._state.record_loaded(LoadedAdapter(name, path))
        started = time.perf_counter()
        answered = await load(self._engine, name, path)
        load_s = time.perf_counter() - started
        seen = await see(self._engine, name, path)
        if seen is None:
            silent = "" if answered else ", and did not answer the load"
            raise EngineInterrupted(f"the engine does not list it with our path{silent}")
        if await self._engine.incarnation() != incarnation:
            raise EngineInterrupted("the engine was restarted meanwhile")
        self._loaded_ids = await self._worker_ids() - before
        return seen, load_s

    async def unload(self) -> None:
        """Unload what this replay has loaded, or may have loaded. Idempotent.

        An unload waits for a load of the same name, so it also ends one that got no answer.

        Raises:
            EngineError: the server did not answer; the adapter stays recorded as loaded.
        """
        loaded = self._state.loaded
        if loaded is None:
            return
        try:
            with contextlib.suppress(AdapterMissing):
                await self._engine.unload(loaded.name)
        except EngineUnreachable as error:
            if not is_gone(error):
                raise
        self._state.record_loaded(None)
        await self._free_memory()

    async def unload_interrupted(self) -> None:
        """Unload what a killed replay had loaded, if it is still loaded from the same path.

        Raises:
            EngineError: as the calls.
        """
        loaded = self._state.loaded
        if loaded is None:
            return
        adapters = (await self._engine.models()).adapters
        if any(a.name == loaded.name and a.path == loaded.path for a in adapters):
            log.info("unloading %s, which an interrupted replay had loaded", loaded.name)
            await self.unload()
        else:
            self._state.record_loaded(None)

    def discard(self, name: str, directory: str) -> None:
        """Mark a copy that this replay made for deletion by `tidy`."""
        self._unneeded[name] = directory

    async def tidy(self) -> None:
        """Delete the marked copies that no request uses, as far as the engine can say so."""
        if not self._unneeded:
            return
        with contextlib.suppress(EngineError, TimeoutError):
            base = (await self._engine.models()).base.name
            async with asyncio.timeout(_ALIVE_S):
                # the engine updates its busy list only in a step
                await self._engine.score(base, PROBE_TOKENS)
            snapshot = await self._engine.snapshot()
            listed = {a.name for a in snapshot.models.adapters}
            for name, directory in list(self._unneeded.items()):
                if snapshot.busy is not None and name not in snapshot.busy | listed:
                    await asyncio.to_thread(self._cache.delete, directory)
                    del self._unneeded[name]

    @property
    def undeleted(self) -> tuple[str, ...]:
        """Directories of marked copies that are not deleted yet."""
        return tuple(f"{self._cache.home}/{name}" for name in self._unneeded.values())

    async def _worker_ids(self) -> frozenset[int]:
        return await self._engine.resident_ids() if self.frees_memory else frozenset()

    async def _free_memory(self) -> None:
        """Remove the unloaded adapter from the workers, if exactly one appeared with its load."""
        ids, self._loaded_ids = self._loaded_ids, frozenset()
        if len(ids) != 1:
            return
        with contextlib.suppress(EngineError):
            await self._engine.remove_resident(*ids)
