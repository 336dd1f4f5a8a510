"""Which of our versions are in the workers' memory, by the ids seen at their loads.

vLLM 0.32 keeps an unloaded adapter in its worker until its own cache drops it, and prefers it to
a served one that is idle. It returns ids but no names, and gives a higher id at each load: an id
above all that were there before our load, and the only such, is ours. Anything else is unknown
and left alone. Needs the development routes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError, RouteMissing

log = logging.getLogger(__name__)


class WorkerSlots:
    """Learns ids around loads; what it cannot learn costs nothing but memory of the engine.

    Args:
        engine: is asked for the ids.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._incarnation: str | None = None
        self._highest: int | None = None
        self._has_route = True
        self._ids: dict[int, int] = {}

    def of(self, incarnation: str) -> Mapping[int, int]:
        """Version -> adapter id in that incarnation; empty for any other."""
        return dict(self._ids) if incarnation == self._incarnation else {}

    def forget(self, version: int) -> None:
        """Its id is gone."""
        self._ids.pop(version, None)

    async def before_load(self, incarnation: str) -> None:
        """Read the ids, unless they are known since the last load of this incarnation."""
        if incarnation != self._incarnation:
            self._incarnation, self._ids = incarnation, {}
            self._highest, self._has_route = None, True
        if self._highest is None:
            ids = await self._read()
            self._highest = None if ids is None else max(ids, default=0)

    async def after_load(self, version: int) -> None:
        """Learn the version's id, also of a load that failed: some leave an adapter behind."""
        highest = self._highest
        ids = None if highest is None else await self._read()
        if highest is None or ids is None:
            self._highest = None
            return
        new = [resident for resident in ids if resident > highest]
        if len(new) == 1:
            self._ids[version] = new[0]
        self._highest = max(new, default=highest)

    async def _read(self) -> frozenset[int] | None:
        if not self._has_route:
            return None
        try:
            return await self._engine.resident_ids()
        except RouteMissing:
            self._has_route = False
        except EngineError as error:
            log.debug("the ids in the workers' memory are not known: %s", error)
        return None
