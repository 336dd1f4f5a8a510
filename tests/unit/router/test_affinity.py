"""Prefixes, slots and counters over many requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policyline.router.affinity.affinity import (
    Affinity,
    Assignment,
    ReplicaOption,
    choose,
)
from policyline.router.affinity.prefixes import COMMON_FANOUT, Prefixes
from policyline.router.affinity.prompts import TEXT_BLOCK_BYTES, chain_of
from policyline.router.gate import Endpoint
from tests.unit.router.views import digest

BLOCK = 16


def endpoint(name: str, incarnation: str = "1", slots: int | None = 6) -> Endpoint:
    return Endpoint(name, incarnation, f"http://{name}", slots, 1)


ENDPOINTS = [endpoint("r0"), endpoint("r1")]


def prompt(number: int, blocks: int = 5, template: int = 0) -> tuple[int, ...]:
    tokens = [7] * template + [number * 1000 + n for n in range(BLOCK * blocks - template)]
    return chain_of({"prompt": tokens}, BLOCK)


def affinity(spill: int = 4, max_blocks: int = 100_000) -> Affinity:
    return Affinity(spill=spill, max_blocks=max_blocks)


def send(
    where: Affinity, chain: tuple[int, ...], version: int = 1, endpoints: list[Endpoint] = ENDPOINTS
) -> Assignment:
    assignment = where.begin(version, digest(version), chain, endpoints)
    assert assignment is not None
    return assignment


def test_a_group_stays_together() -> None:
    where = affinity(spill=8)

    group = [send(where, prompt(1)) for _ in range(8)]

    assert len({t.endpoint.replica for t in group}) == 1
    assert [t.kind for t in group] == ["unmatched"] + ["matched"] * 7


def test_after_a_spill_both_own_it() -> None:
    where = affinity(spill=2)
    given = [send(where, prompt(1)) for _ in range(4)]

    assert [t.kind for t in given] == ["unmatched", "matched", "matched", "spilled"]
    assert send(where, prompt(1)).endpoint == given[-1].endpoint
    assert send(where, prompt(1)).kind == "matched"


def test_another_version_of_the_same_prompt_is_cold() -> None:
    where = affinity()
    send(where, prompt(1), version=1)

    assert send(where, prompt(1), version=2).kind == "unmatched"


def test_a_longer_prompt_goes_to_who_holds_most_of_it() -> None:
    where = affinity(spill=0)
    short = send(where, prompt(1, blocks=2))
    other = send(where, prompt(1, blocks=4))
    assert short.endpoint != other.endpoint

    where.end(short)
    where.end(other)
    assert send(where, prompt(1, blocks=6)).endpoint == other.endpoint


def test_a_common_prefix_is_not_counted_once_it_is_known() -> None:
    where = affinity(spill=1000)
    for number in range(COMMON_FANOUT + 1):
        send(where, prompt(number, template=40))
    before = where.kinds["unmatched"]

    cold = [send(where, prompt(1000 + n, template=40)).kind for n in range(10)]

    assert cold == ["unmatched"] * 10
    assert before < COMMON_FANOUT, "the template is learnt from prompts, not known before"
    assert send(where, prompt(1000, template=40)).kind == "matched"


def test_a_common_prefix_is_common_in_every_version() -> None:
    where = affinity(spill=1000)
    for number in range(COMMON_FANOUT + 1):
        send(where, prompt(number, template=40))
    send(where, prompt(1, template=40), version=2)

    assert send(where, prompt(2, template=40), version=2).kind == "unmatched"


def test_the_ways_in_which_a_group_goes_on_are_no_common_prefix() -> None:
    where = affinity(spill=1000)
    first = send(where, prompt(1, blocks=3))
    for number in range(32):
        turn = chain_of({"prompt": [1000 + n for n in range(48)] + [number] * 16}, BLOCK)
        assert send(where, turn).endpoint == first.endpoint


def test_a_restarted_replica_owns_nothing() -> None:
    where = affinity()
    former = send(where, prompt(1))
    where.end(former)

    endpoints = [endpoint(s.replica, "2" if s == former.endpoint else "1") for s in ENDPOINTS]

    assert send(where, prompt(1), endpoints=endpoints).kind == "unmatched"


def test_no_more_versions_in_flight_than_slots() -> None:
    where, endpoints = affinity(), [endpoint("r0", slots=2), endpoint("r1", slots=1)]
    given = [send(where, prompt(n), version=n, endpoints=endpoints) for n in (1, 2, 3)]

    assert where.begin(4, digest(4), prompt(4), endpoints) is None
    assert send(where, prompt(5), version=1, endpoints=endpoints).endpoint == given[0].endpoint
    where.end(given[1])
    assert send(where, prompt(4), version=4, endpoints=endpoints).endpoint == given[1].endpoint


def test_memory_is_bounded() -> None:
    where = affinity(max_blocks=1000)

    for number in range(2000):
        where.end(send(where, prompt(number)))

    assert 500 <= where.known_blocks <= 1010
    assert send(where, prompt(1999)).kind == "matched"
    assert send(where, prompt(0)).kind == "unmatched"


@given(text=st.text(), cut=st.integers(0, 300))
def test_equal_beginnings_have_equal_chains(text: str, cut: int) -> None:
    whole = (text * 20)[:400]
    part = chain_of({"prompt": whole[:cut]}, BLOCK)

    complete = len(whole[:cut].encode(errors="replace")) // TEXT_BLOCK_BYTES
    assert part == chain_of({"prompt": whole}, BLOCK)[: len(part)]
    assert len(part) == complete


def test_prompts_of_every_form() -> None:
    tokens = list(range(40))
    chat = [{"role": "user", "content": "x" * 100}]

    assert len(chain_of({"prompt": tokens}, 16)) == 2
    assert chain_of({"prompt": [tokens, [1]]}, 16) == chain_of({"prompt": tokens}, 16)
    assert chain_of({"prompt": ["a" * 64]}, 16) == chain_of({"prompt": "a" * 64}, 16)
    assert len(chain_of({"messages": chat}, 16)) == 1
    assert chain_of({"messages": chat, "tools": [{"a": 1}]}, 16) != chain_of({"messages": chat}, 16)
    odd_bodies: list[dict[str, Any]] = [
        {},
        {"prompt": 3},
        {"prompt": [1.5] * 20},
        {"prompt": []},
        {"messages": 3},
    ]
    for odd in odd_bodies:
        assert chain_of(odd, 16) == ()
    parts = [{"role": "user", "content": [{"type": "text", "text": "y" * 100}]}]
    assert len(chain_of({"messages": parts}, 16)) >= 1


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4), st.sampled_from("12"), st.booleans()),
    max_size=60,
)


@settings(deadline=None)
@given(steps=STEPS)
def test_two_routers_told_the_same_choose_the_same(
    steps: list[tuple[int, int, str, bool]],
) -> None:
    pair = (affinity(spill=1), affinity(spill=1))
    open_pairs: list[tuple[Assignment, ...]] = []
    for number, version, incarnation, ends in steps:
        if ends and open_pairs:
            for where, assignment in zip(pair, open_pairs.pop(0), strict=True):
                where.end(assignment)
            continue
        endpoints = [endpoint("r0", incarnation, slots=2), endpoint("r1", slots=2)]
        found = tuple(w.begin(version, digest(version), prompt(number), endpoints) for w in pair)
        assert found[0] == found[1]
        assignments = tuple(t for t in found if t is not None)
        if assignments:
            open_pairs.append(assignments)
    for where in pair:
        assert where.in_flight().total() == len(open_pairs)
        assert where.kinds.total() == where.routed.total()


@settings(deadline=None)
@given(
    sent=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 2)), max_size=40),
    asked=st.tuples(st.integers(0, 3), st.integers(1, 6)),
)
def test_what_is_held_is_what_was_sent(
    sent: list[tuple[int, int, int]], asked: tuple[int, int]
) -> None:
    prefixes, joined = Prefixes(100_000), [endpoint(f"r{n}") for n in range(3)]
    longest: Counter[int] = Counter()
    for number, blocks, incarnation in sent:
        prefixes.own(digest(1), prompt(number, blocks), joined[incarnation])
        if number == asked[0]:
            longest[incarnation] = max(longest[incarnation], blocks)

    held, owners = prefixes.holders(digest(1), prompt(*asked))

    best = max((min(asked[1], n) for n in longest.values()), default=0)
    assert held == best
    holding = {n for n in range(3) if owners & prefixes.bit(joined[n])} if held else set()
    assert holding == {n for n, blocks in longest.items() if min(blocks, asked[1]) == best and best}


OPTIONS = st.lists(
    st.builds(
        ReplicaOption,
        replica=st.sampled_from([f"r{n}" for n in range(8)]),
        held=st.integers(0, 5),
        in_flight=st.integers(0, 40),
        routed=st.integers(0, 100),
        has_slot=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda c: c.replica,
)


def test_the_holder_gets_it() -> None:
    pair = [ReplicaOption("r0", 0, 0), ReplicaOption("r1", 3, 4)]

    assert choose(pair, spill=4) == ("r1", "matched")


def test_a_holder_that_is_too_busy_spills_to_the_least_loaded() -> None:
    pair = [ReplicaOption("r0", 0, 0), ReplicaOption("r1", 3, 5)]

    assert choose(pair, spill=4) == ("r0", "spilled")


def test_an_unknown_prompt_goes_to_the_least_loaded() -> None:
    assert choose([ReplicaOption("r0", 0, 2), ReplicaOption("r1", 0, 1)], 4) == ("r1", "unmatched")


def test_a_tie_goes_to_the_one_that_was_sent_fewest() -> None:
    pair = [ReplicaOption("r0", 0, 1, routed=9), ReplicaOption("r1", 0, 1, routed=8)]

    assert choose(pair, 4) == ("r1", "unmatched")


def test_no_replica_has_a_slot() -> None:
    assert choose([ReplicaOption("r0", 3, 0, has_slot=False)], 4) is None
    assert choose([], 4) is None


@given(options=OPTIONS, spill=st.integers(0, 20))
def test_the_choice_has_a_slot_and_follows_the_rules(
    options: list[ReplicaOption], spill: int
) -> None:
    choice = choose(options, spill)

    able = {c.replica: c for c in options if c.has_slot}
    if choice is None:
        assert not able
        return
    replica, kind = choice
    chosen = able[replica]
    least = min(c.in_flight for c in able.values())
    most = max(c.held for c in able.values())
    assert chosen.in_flight - least <= spill or kind == "matched"
    match kind:
        case "matched":
            assert chosen.held == most > 0
            assert chosen.in_flight - least <= spill
        case "spilled":
            assert most > 0
            assert chosen.in_flight == least
            assert all(c.in_flight - least > spill for c in able.values() if c.held == most)
        case "unmatched":
            assert most == 0
            assert chosen.in_flight == least


@given(options=OPTIONS, spill=st.integers(0, 20))
def test_the_order_of_the_options_does_not_matter(options: list[ReplicaOption], spill: int) -> None:
    assert choose(options, spill) == choose(options[::-1], spill)
