"""What the router learns of its replicas: who cannot be reached now, and their block size."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Sequence
from typing import Final

from policyline.router.errors import UpstreamUnreachable
from policyline.router.gate import Seat
from policyline.router.upstream import Upstream
from policyline.router.view import Keeper

log = logging.getLogger(__name__)

COOL_S: Final = 1.0
"""A replica that refused a connection is the last to be asked for so long."""
DEFAULT_BLOCK_TOKENS: Final = 16
"""vLLM's on a GPU."""
_LOOK_EVERY_S: Final = 2.0
_BLOCK = re.compile(r'vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"')


class Fleet:
    """Observations of replicas, beside what the ledger says.

    Args:
        upstream: asks them.
        keeper: knows them.
    """

    def __init__(self, upstream: Upstream, keeper: Keeper) -> None:
        self._upstream = upstream
        self._keeper = keeper
        self._cool_until: dict[tuple[str, str], float] = {}
        self._blocks: dict[tuple[str, str], int] = {}
        self.block_tokens = DEFAULT_BLOCK_TOKENS
        """The coarsest block size of the fleet: its boundaries are boundaries everywhere."""

    def cool(self, seat: Seat) -> None:
        """It could not be reached."""
        self._cool_until[seat.replica, seat.incarnation] = time.monotonic() + COOL_S

    def warm(self, seats: Sequence[Seat]) -> Sequence[Seat]:
        """Those that were not unreachable a moment ago; all, when there are none."""
        if not self._cool_until:
            return seats
        now = time.monotonic()
        self._cool_until = {life: t for life, t in self._cool_until.items() if t > now}
        cool = self._cool_until
        return [s for s in seats if (s.replica, s.incarnation) not in cool] or seats

    async def learn_for_ever(self) -> None:
        """Ask each new life of a replica for its block size."""
        while True:
            await self.learn()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def learn(self) -> None:
        """Ask those that were not asked yet."""
        view = self._keeper.view
        rows = [] if view is None else list(view.replicas.values())
        lives = {
            (r.replica, r.incarnation): r.url
            for r in rows
            if r.state == "joined" and r.incarnation and r.url
        }
        self._blocks = {life: tokens for life, tokens in self._blocks.items() if life in lives}
        fresh = [life for life in lives if life not in self._blocks]
        answers = await asyncio.gather(*(self._block_tokens(lives[life]) for life in fresh))
        for life, found in zip(fresh, answers, strict=True):
            if found is not None:
                self._blocks[life] = found
        self._settle(self._blocks.values())

    def _settle(self, found: Iterable[int]) -> None:
        coarsest = max(found, default=DEFAULT_BLOCK_TOKENS)
        if coarsest != self.block_tokens:
            log.info("prefix blocks of %d tokens", coarsest, extra={"event": "block_size"})
        self.block_tokens = coarsest

    async def _block_tokens(self, url: str) -> int | None:
        """From the metrics; else from the development route, where there is one."""
        try:
            found = _BLOCK.search(await self._upstream.get_text(f"{url}/metrics"))
            if found:
                return int(found[1])
            info = await self._upstream.get_json(f"{url}/server_info?config_format=json")
            return int(info["vllm_config"]["cache_config"]["block_size"])
        except UpstreamUnreachable:
            return None
        except (KeyError, TypeError, ValueError):
            return DEFAULT_BLOCK_TOKENS
