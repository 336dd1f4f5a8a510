"""Puts one version at a time on a server, and takes it off again.

It unloads only what it loaded, and deletes only copies that it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Final

from policyline.ledger.probe import PROBE_TOKENS
from policyline.replay_into.state import Held, StateFile
from policyline.watcher.cache import Cache
from policyline.watcher.observe import is_gone
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterMissing, EngineError, EngineUnreachable
from policyline.watcher.vllm.loading import Seen, load, see

log = logging.getLogger(__name__)

_ALIVE_S: Final = 5.0
"""Longest wait for the request that makes a living engine show what is busy."""


class Broke(Exception):
    """The engine broke off while a version was on it; nobody knows why yet."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A version that was on the server."""

    seen: Seen
    load_s: float


class Stand:
    """One place on a server, for one version at a time.

    Args:
        engine: the server.
        cache: local copies, which the server reads.
        state: remembers what is loaded, also beyond this process.
        frees_memory: whether the server has development routes.
    """

    def __init__(
        self, engine: EngineClient, cache: Cache, state: StateFile, *, frees_memory: bool
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._state = state
        self._frees_memory = frees_memory
        self._resident: frozenset[int] = frozenset()
        self._unneeded: dict[str, str] = {}
        """Name -> directory of copies that we made and that are unloaded."""

    async def show(self, name: str, place: str, incarnation: str) -> Shown:
        """Load a local copy, see that it is listed, and probe it.

        Raises:
            Broke: the engine is another incarnation, or does not list it.
            EngineError: as the calls.
        """
        path = f"{self._cache.home}/{place}"
        before = await self._resident_ids()
        self._state.hold(Held(name, path))
        started = time.perf_counter()
        answered = await load(self._engine, name, path)
        load_s = time.perf_counter() - started
        seen = await see(self._engine, name, path)
        if seen is None:
            silent = "" if answered else ", and did not answer the load"
            raise Broke(f"the engine does not list it with our path{silent}")
        if await self._engine.incarnation() != incarnation:
            raise Broke("the engine was restarted meanwhile")
        self._resident = await self._resident_ids() - before
        return Shown(seen, load_s)

    async def take_off(self) -> None:
        """Unload what is, or may be, loaded by us. Idempotent.

        An unload waits for a load of the same name, so it also ends one that got no answer.

        Raises:
            EngineError: it could not be asked; what is held stays noted.
        """
        held = self._state.progress.held
        if held is None:
            return
        try:
            with contextlib.suppress(AdapterMissing):
                await self._engine.unload(held.name)
        except EngineUnreachable as error:
            if not is_gone(error):
                raise
        self._state.release()
        await self._free_memory()

    async def take_off_leftover(self) -> None:
        """Unload what a killed replay left, if it is still there with its path.

        Raises:
            EngineError: as the calls.
        """
        held = self._state.progress.held
        if held is None:
            return
        adapters = (await self._engine.models()).adapters
        if any(a.name == held.name and a.path == held.path for a in adapters):
            log.info("unloading %s, which an interrupted replay left", held.name)
            await self.take_off()
        else:
            self._state.release()

    def discard(self, name: str, place: str) -> None:
        """Delete a copy, which we made, as soon as the engine has no use for it."""
        self._unneeded[name] = place

    async def tidy(self) -> None:
        """Delete copies that a living engine shows no request on; others stay for the next time."""
        if not self._unneeded:
            return
        with contextlib.suppress(EngineError, TimeoutError):
            base = (await self._engine.models()).base.name
            async with asyncio.timeout(_ALIVE_S):
                await self._engine.score(base, PROBE_TOKENS)  # only a step renews what is busy
            snapshot = await self._engine.snapshot()
            listed = {a.name for a in snapshot.models.adapters}
            for name, place in list(self._unneeded.items()):
                if snapshot.busy is not None and name not in snapshot.busy | listed:
                    await asyncio.to_thread(self._cache.delete, place)
                    del self._unneeded[name]

    @property
    def kept(self) -> tuple[str, ...]:
        """Directories of copies that are not deleted yet."""
        return tuple(f"{self._cache.home}/{place}" for place in self._unneeded.values())

    async def _resident_ids(self) -> frozenset[int]:
        return await self._engine.resident_ids() if self._frees_memory else frozenset()

    async def _free_memory(self) -> None:
        """Remove the unloaded adapter from the workers; only if exactly one came with ours."""
        ids, self._resident = self._resident, frozenset()
        if len(ids) != 1:
            return
        with contextlib.suppress(EngineError):
            await self._engine.remove_resident(*ids)
