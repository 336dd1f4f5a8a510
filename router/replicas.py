"""What the router observes of its replicas itself: which are unreachable, and their block size."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from typing import Final

from policyline.router.errors import UpstreamUnreachable
from policyline.router.gate import Endpoint
from policyline.router.upstream import Upstream
from policyline.router.view import ViewCache

log = logging.getLogger(__name__)

_UNREACHABLE_S: Final = 1.0
"""A replica that refused a connection is avoided for this long."""
DEFAULT_BLOCK_TOKENS: Final = 16
"""vLLM's on a GPU."""
_REFRESH_EVERY_S: Final = 2.0
_BLOCK_SIZE: Final = re.compile(r'vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"')

_Key = tuple[str, str]
"""Replica and incarnation."""


class ReplicaMonitor:
    """Observations of replicas that are not in the ledger.

    Args:
        upstream: the HTTP client.
        view_cache: lists the replicas.
    """

    def __init__(self, upstream: Upstream, view_cache: ViewCache) -> None:
        self._upstream = upstream
        self._view_cache = view_cache
        self._unreachable_until: dict[_Key, float] = {}
        self._block_sizes: dict[_Key, int] = {}
        self.block_tokens = DEFAULT_BLOCK_TOKENS
        """The largest block size in the fleet: its block boundaries are boundaries everywhere."""

    def mark_unreachable(self, endpoint: Endpoint) -> None:
        """A connection to it failed."""
        key = endpoint.replica, endpoint.incarnation
        self._unreachable_until[key] = time.monotonic() + _UNREACHABLE_S

    def reachable(self, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those that were not marked a moment ago; all of them when every one was."""
        if not self._unreachable_until:
            return endpoints
        now = time.monotonic()
        marked = {key: until for key, until in self._unreachable_until.items() if until > now}
        self._unreachable_until = marked
        return [e for e in endpoints if (e.replica, e.incarnation) not in marked] or endpoints

    async def run(self) -> None:
        """Refresh block sizes until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(_REFRESH_EVERY_S)

    async def refresh(self) -> None:
        """Ask each incarnation with an unknown block size for it."""
        urls = {
            (row.replica, row.incarnation): row.url
            for row in self._view_cache.view.replicas.values()
            if row.state == "joined" and row.incarnation and row.url
        }
        known = {key: tokens for key, tokens in self._block_sizes.items() if key in urls}
        unknown = [key for key in urls if key not in known]
        answers = await asyncio.gather(*(self._block_size(urls[key]) for key in unknown))
        known |= {key: n for key, n in zip(unknown, answers, strict=True) if n is not None}
        self._block_sizes = known
        largest = max(known.values(), default=DEFAULT_BLOCK_TOKENS)
        if largest != self.block_tokens:
            log.info("prefix blocks of %d tokens", largest, extra={"event": "block_size"})
        self.block_tokens = largest

    async def _block_size(self, url: str) -> int | None:
        """From the metrics, else from the development route; None when nothing answers."""
        try:
            found = _BLOCK_SIZE.search(await self._upstream.get_text(f"{url}/metrics"))
            if found:
                return int(found[1])
            info = await self._upstream.get_json(f"{url}/server_info?config_format=json")
            return int(info["vllm_config"]["cache_config"]["block_size"])
        except UpstreamUnreachable:
            return None
        except (KeyError, TypeError, ValueError):
            return DEFAULT_BLOCK_TOKENS
