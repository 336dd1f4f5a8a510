"""Which replica holds which prefix, by what the router sent there. Bounded memory; no I/O."""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from policyline.router.affinity.prompts import Chain
from policyline.router.gate import Endpoint

COMMON_FANOUT: Final = 64
"""A block followed by this many different blocks belongs to a template, not to one prompt. It must
be larger than a group of rollouts, which continues one prompt in 8 to 32 ways."""
MAX_COMMON: Final = 4096
"""Template blocks that are remembered."""


class Prefixes:
    """Owners of blocks, and which blocks are common.

    A replica that was sent a prompt owns its blocks under the version's digest: vLLM's prefix cache
    is separate for each adapter. Two maps bound the memory: when the new one is full it replaces
    the old one, and blocks that were not used meanwhile are forgotten.

    Args:
        max_blocks: the most (version, block) pairs that are remembered.
    """

    def __init__(self, max_blocks: int) -> None:
        self._half = max(1, max_blocks // 2)
        self._owners: dict[int, int] = {}
        self._old_owners: dict[int, int] = {}
        self._followers: dict[int, int] = {}
        self._old_followers: dict[int, int] = {}
        self._common: set[int] = set()
        self._bits: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        """Number of remembered pairs."""
        return len(self._owners) + len(self._old_owners)

    def holders(self, digest: str, chain: Chain) -> tuple[int, int]:
        """The longest match, in blocks, and the bits of the endpoints that hold it.

        Blocks of a common prefix do not count: every prompt has them. Who owns a block owns all
        before it, so the deepest block with an owner decides.
        """
        common = self.common_depth(chain)
        seed = _seed(digest)
        for depth in range(len(chain), common, -1):
            key = chain[depth - 1] ^ seed
            owners = self._owners.get(key) or self._old_owners.get(key)
            if owners:
                return depth - common, owners
        return 0, 0

    def common_depth(self, chain: Chain) -> int:
        """Number of leading blocks that are common to many prompts."""
        return len(list(takewhile(self._common.__contains__, chain)))

    def bit(self, endpoint: Endpoint) -> int:
        """The endpoint's own bit. A new incarnation gets a new one, so it owns nothing."""
        key = (endpoint.replica, endpoint.incarnation)
        return self._bits.setdefault(key, 1 << len(self._bits))

    def own(self, digest: str, chain: Chain, endpoint: Endpoint) -> None:
        """Record that the endpoint is sent this prompt."""
        bit, seed = self.bit(endpoint), _seed(digest)
        owners, old = self._owners, self._old_owners
        if chain and owners.get(chain[-1] ^ seed, 0) & bit:
            return  # so it owns all blocks before it
        self._count_followers(chain)
        for block in chain:
            key = block ^ seed
            owners[key] = (owners.get(key) or old.get(key, 0)) | bit
        if len(owners) >= self._half:
            self._old_owners, self._owners = owners, {}

    def _count_followers(self, chain: Chain) -> None:
        """Find common prefixes by fan-out: a block seen for the first time is a new follower."""
        followers, old = self._followers, self._old_followers
        known = len(chain)
        while known > 0 and chain[known - 1] not in followers:
            known -= 1
        for depth in range(known, len(chain)):
            block = chain[depth]
            followers[block] = old.get(block, 0)
            if depth > 0 and block not in old:
                parent = chain[depth - 1]
                followers[parent] += 1
                if followers[parent] >= COMMON_FANOUT:
                    self._mark_common(chain[:depth])
        if len(followers) >= self._half:
            self._old_followers, self._followers = followers, {}

    def _mark_common(self, chain: Chain) -> None:
        if len(self._common) > MAX_COMMON:
            self._common.clear()
        self._common.update(chain)


def _seed(digest: str) -> int:
    """64 bits of the version's digest (hex): the same block of two versions is two blocks."""
    return int(digest[:16], 16)
