"""The memory for prefixes stays bounded."""

from __future__ import annotations

from policyline.router.affinity.prefixes import COMMON_FANOUT, MAX_COMMON, Prefixes
from policyline.router.gate import Endpoint

DIGEST = "ab" * 32
R0 = Endpoint("r0", "1", "http://r0", None, 1)


def test_common_prefixes_are_bounded_and_learned_again() -> None:
    prefixes = Prefixes(10_000_000)
    deep = tuple(range(1, MAX_COMMON + 3))

    def use(template: tuple[int, ...], first_suffix: int) -> None:
        for number in range(COMMON_FANOUT):
            prefixes.own(DIGEST, (*template, first_suffix + number), R0)

    use(deep, 1 << 40)
    assert prefixes.common_depth(deep) == len(deep)

    other = (1 << 50, 2 << 50)
    use(other, 1 << 41)
    assert prefixes.common_depth(other) == len(other)
    assert prefixes.common_depth(deep) == 0, "the bound was passed, so all were forgotten"


def test_what_is_used_survives_and_what_is_not_is_forgotten() -> None:
    prefixes = Prefixes(8)
    used, unused = (1, 2), (3, 4)
    prefixes.own(DIGEST, unused, R0)
    for number in range(10):
        prefixes.own(DIGEST, used, R0)
        prefixes.own(DIGEST, (100 + number, 200 + number), R0)

    assert prefixes.holders(DIGEST, used)[0] == 2
    assert prefixes.holders(DIGEST, unused) == (0, 0)
    assert len(prefixes) <= 8 + 4
