"""Which replica gets a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policyline.router.choose import Candidate, Choice, choose

CANDIDATES = st.lists(
    st.builds(
        Candidate,
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
    pair = [Candidate("r0", 0, 0), Candidate("r1", 3, 4)]

    assert choose(pair, spill=4) == Choice("r1", "matched")


def test_a_holder_too_far_ahead_spills_to_the_least_loaded() -> None:
    pair = [Candidate("r0", 0, 0), Candidate("r1", 3, 5)]

    assert choose(pair, spill=4) == Choice("r0", "spilled")


def test_a_cold_prompt_goes_to_the_least_loaded() -> None:
    assert choose([Candidate("r0", 0, 2), Candidate("r1", 0, 1)], 4) == Choice("r1", "unmatched")


def test_a_tie_goes_to_the_one_that_was_sent_fewest() -> None:
    pair = [Candidate("r0", 0, 1, routed=9), Candidate("r1", 0, 1, routed=8)]

    assert choose(pair, 4) == Choice("r1", "unmatched")


def test_nobody_with_a_slot() -> None:
    assert choose([Candidate("r0", 3, 0, has_slot=False)], 4) is None
    assert choose([], 4) is None


@given(candidates=CANDIDATES, spill=st.integers(0, 20))
def test_the_choice_is_able_and_keeps_the_rules(candidates: list[Candidate], spill: int) -> None:
    choice = choose(candidates, spill)

    able = {c.replica: c for c in candidates if c.has_slot}
    if choice is None:
        assert not able
        return
    chosen = able[choice.replica]
    least = min(c.in_flight for c in able.values())
    most = max(c.held for c in able.values())
    assert chosen.in_flight - least <= spill or choice.kind == "matched"
    match choice.kind:
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


@given(candidates=CANDIDATES, spill=st.integers(0, 20), dice=st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_is_no_matter(
    candidates: list[Candidate], spill: int, dice: object
) -> None:
    shuffled = candidates[::-1]

    assert choose(candidates, spill) == choose(shuffled, spill)
