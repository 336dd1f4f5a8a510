"""How a probe is compared, ranges are parsed and progress is stored."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from policyline.replay_into.errors import StateInvalid
from policyline.replay_into.model import Outcome, Recorded, Replayed, judge
from policyline.replay_into.records import Range, parse_range
from policyline.replay_into.state import LoadedAdapter, StateFile, Subject

HERE = Recorded("r0", "here", "[-1.0,-2.0]")
THERE = Recorded("r1", "there", "[-1.5,-2.0]")
PERFECT = {"version": 1, "name": "n", "digest": "d", "outcome": "perfect"}
SUBJECT = Subject("ledger", "run", "http://vllm", "build")


@pytest.mark.parametrize(
    ("probe", "recorded", "outcome", "difference", "replica"),
    [
        ((-1.0, -2.0), [HERE], "agrees", 0.0, "r0"),
        ((-1.0, -2.0), [THERE, HERE], "agrees", 0.0, "r0"),
        ((-1.0, -2.0), [THERE], "other_build", 0.5, "r1"),
        ((-1.0, -2.0), [], "unrecorded", None, None),
        ((-1.25, -2.0), [HERE], "differs", 0.25, "r0"),
        ((-1.125, -2.0), [HERE], "agrees", 0.125, "r0"),
        ((-1.0,), [HERE], "unrecorded", None, None),
        ((float("nan"), -2.0), [HERE], "differs", None, "r0"),
    ],
)
def test_the_same_build_is_judged_and_another_reported(
    probe: tuple[float, ...],
    recorded: list[Recorded],
    outcome: Outcome,
    difference: float | None,
    replica: str | None,
) -> None:
    judged, found, reference = judge(probe, recorded, "here", tolerance=0.125)

    assert judged == outcome
    assert (reference.replica if reference else None) == replica
    if difference is not None:
        assert found == difference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3..7", Range(3, 7)),
        ("v3..v7", Range(3, 7)),
        ("3..", Range(3, None)),
        ("..7", Range(None, 7)),
        ("5", Range(5, 5)),
        ("7..3", None),
        ("..", None),
        ("", None),
        ("3-7", None),
        ("a..b", None),
    ],
)
def test_ranges(text: str, expected: Range | None) -> None:
    assert parse_range(text) == expected


def test_a_range_holds_both_its_ends() -> None:
    assert [n for n in range(1, 9) if Range(3, 5).holds(n)] == [3, 4, 5]
    assert [n for n in range(1, 4) if Range().holds(n)] == [1, 2, 3]
    assert str(Range(3, None)) == "3.."


def test_progress_survives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    result = Replayed(1, "trl-policy-v1", "d", "agrees", difference=0.0, phases={"load": 0.1})
    first = StateFile(path)
    first.open(SUBJECT)
    first.finish(result)
    first.record_loaded(LoadedAdapter("trl-policy-v2", "/cache/trl-policy-v2-d"))

    again = StateFile(path)
    again.open(SUBJECT)

    assert again.done == {1: result}
    assert again.loaded == LoadedAdapter("trl-policy-v2", "/cache/trl-policy-v2-d")
    again.record_loaded(None)
    third = StateFile(path)
    third.open(SUBJECT)
    assert third.loaded is None


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"subject": {"run": "r"}}',
        json.dumps({"subject": asdict(SUBJECT), "loaded": None, "done": [{"version": 1}]}),
        json.dumps({"subject": asdict(SUBJECT), "loaded": None, "done": [PERFECT]}),
    ],
)
def test_a_file_that_is_no_state_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)

    with pytest.raises(StateInvalid, match="cannot be read"):
        StateFile(path).open(SUBJECT)
    assert path.read_text() == content


def test_without_a_file_progress_is_only_in_memory() -> None:
    state = StateFile(None)
    state.open(SUBJECT)
    state.record_loaded(LoadedAdapter("a", "b"))

    assert state.loaded == LoadedAdapter("a", "b")
