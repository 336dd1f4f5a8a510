"""Which replica holds which prefix, as far as the router sent it there. Bounded memory; no I/O."""

from __future__ import annotations

from typing import Final

from policyline.router.affinity.prompts import Chain
from policyline.router.gate import Seat

COMMON_FANOUT: Final = 64
"""A block that so many different blocks followed is a template's, not a prompt's. A group of
rollouts goes on from its prompt in as many ways as it has members, which must not count: groups
of 8 to 32 are usual."""
MAX_COMMON: Final = 4096
"""Templates' blocks that are remembered."""


class Prefixes:
    """Owners of blocks, and which blocks are common.

    A replica that was sent a prompt owns its blocks under the version's digest: vLLM's prefix cache
    is separate for each adapter. Two generations bound the memory: when the younger is full it
    becomes the elder, and what nobody touches meanwhile is forgotten.

    Args:
        max_blocks: the most (version, block) pairs that are remembered.
    """

    def __init__(self, max_blocks: int) -> None:
        self._half = max(1, max_blocks // 2)
        self._owners: dict[int, int] = {}
        self._elder_owners: dict[int, int] = {}
        self._followers: dict[int, int] = {}
        self._elder_followers: dict[int, int] = {}
        self._common: set[int] = set()
        self._bits: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        """How many pairs are remembered."""
        return len(self._owners) + len(self._elder_owners)

    def holders(self, digest: str, chain: Chain) -> tuple[int, int]:
        """(number of specific blocks that are held most, bits of the seats that hold so many).

        Blocks of a common prefix are not counted: every prompt has them. A block is owned with all
        before it, so the deepest one that has an owner decides.
        """
        common = self.common_depth(chain)
        seed = _seed(digest)
        for depth in range(len(chain), common, -1):
            key = chain[depth - 1] ^ seed
            owners = self._owners.get(key) or self._elder_owners.get(key)
            if owners:
                return depth - common, owners
        return 0, 0

    def common_depth(self, chain: Chain) -> int:
        """How many blocks at the beginning are common to many prompts."""
        depth = 0
        for block in chain:
            if block not in self._common:
                break
            depth += 1
        return depth

    def bit(self, seat: Seat) -> int:
        """The seat's own bit; a new incarnation has another one, so it owns nothing."""
        life = (seat.replica, seat.incarnation)
        bit = self._bits.get(life)
        if bit is None:
            bit = self._bits[life] = 1 << len(self._bits)
        return bit

    def own(self, digest: str, chain: Chain, seat: Seat) -> None:
        """The seat is sent this prompt."""
        bit, seed = self.bit(seat), _seed(digest)
        owners, elder = self._owners, self._elder_owners
        if chain and owners.get(chain[-1] ^ seed, 0) & bit:
            return  # and so it owns all that is before it
        self._count_followers(chain)
        for block in chain:
            key = block ^ seed
            owners[key] = (owners.get(key) or elder.get(key, 0)) | bit
        if len(owners) >= self._half:
            self._elder_owners, self._owners = owners, {}

    def _count_followers(self, chain: Chain) -> None:
        """Find common prefixes by fan-out: a block that is met the first time is a new follower."""
        followers, elder = self._followers, self._elder_followers
        known = len(chain)
        while known > 0 and chain[known - 1] not in followers:
            known -= 1
        for depth in range(known, len(chain)):
            block = chain[depth]
            followers[block] = elder.get(block, 0)
            if depth > 0 and block not in elder:
                parent = chain[depth - 1]
                followers[parent] += 1
                if followers[parent] >= COMMON_FANOUT:
                    self._mark_common(chain[:depth])
        if len(followers) >= self._half:
            self._elder_followers, self._followers = followers, {}

    def _mark_common(self, chain: Chain) -> None:
        if len(self._common) > MAX_COMMON:
            self._common.clear()
        self._common.update(chain)


def _seed(digest: str) -> int:
    """64 bits of the version's digest (hex): the same block of two versions is two blocks."""
    return int(digest[:16], 16)
