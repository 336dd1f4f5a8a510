"""What is answered for a model name (I2): the right version, a reason, and never another one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import parse_policy_name
from policyline.ledger.rows import ReplicaRow, ReplicaState, ResidencyRow
from policyline.router.gate import (
    Endpoint,
    NotInView,
    NotReady,
    Refuse,
    Serve,
    absent,
    prepare,
)
from tests.unit.router.views import acked, digest, line_view, replica_row, version_row


def test_a_version_is_served_by_those_whose_present_incarnation_acked_it() -> None:
    view = line_view(
        replicas=(
            replica_row("r0"),
            replica_row("r1", incarnation="2"),
            replica_row("r2", state="lost"),
            replica_row("r3"),
            replica_row("r4", incarnation=None),
        ),
        residency=tuple(acked(f"r{n}", 3) for n in (0, 1, 2, 4)),
    )

    verdict = prepare(view).judge("trl-policy-v3")

    assert isinstance(verdict, Serve)
    assert [s.replica for s in verdict.endpoints] == ["r0"]
    assert (verdict.version, verdict.digest, verdict.run) == (3, digest(3), "run")


def test_a_replica_without_a_url_cannot_be_asked() -> None:
    view = line_view(replicas=(replica_row("r0", url=""),), residency=(acked("r0", 3),))

    assert isinstance(prepare(view).judge("trl-policy-v3"), NotReady)


@pytest.mark.parametrize("name", [None, "", 3, ["trl-policy-v3"], {}])
def test_a_missing_model_is_refused(name: object) -> None:
    verdict = prepare(line_view()).judge(name)

    assert isinstance(verdict, Refuse)
    assert (verdict.status, verdict.code) == (400, "model_missing")


def test_a_model_that_is_no_name_is_shown() -> None:
    verdict = prepare(line_view()).judge(6)

    assert isinstance(verdict, Refuse)
    assert "model is 6" in verdict.message


@pytest.mark.parametrize(
    "name",
    ["tiny", "trl-policy-v", "trl-policy-v03", "trl-policy-v0", "other-v3", "trl-policy-v3 "],
)
def test_a_name_that_is_no_version_of_the_line_is_unknown(name: str) -> None:
    verdict = prepare(line_view()).judge(name)

    assert isinstance(verdict, Refuse)
    assert (verdict.status, verdict.code) == (404, "policy_unknown")
    assert name in verdict.message


def test_published_but_not_acked_waits() -> None:
    verdict = prepare(line_view(replicas=(replica_row("r0"),))).judge("trl-policy-v3")

    assert verdict == NotReady(3, "trl-policy-v3 is not acked by any replica now")


def test_published_behind_the_candidate_waits() -> None:
    waiting = version_row(5, was_current=False)
    view = line_view(candidate=4, others={5: waiting})

    assert isinstance(prepare(view).judge("trl-policy-v5"), NotReady)


@pytest.mark.parametrize("open_run", [None, "another"])
def test_published_in_a_run_that_is_over_waits_no_more(open_run: str | None) -> None:
    view = line_view(others={5: version_row(5, was_current=False)}, open_run=open_run)

    verdict = prepare(view).judge("trl-policy-v5")

    assert isinstance(verdict, Refuse)
    assert verdict.status == 410


@pytest.mark.parametrize(
    ("state", "was_current", "status", "code", "part"),
    [
        ("published", True, 410, "policy_evicted", "current is trl-policy-v3"),
        ("withdrawn", True, 410, "policy_withdrawn", "it was bad"),
        ("skipped", False, 410, "policy_evicted", "it was bad"),
        ("rejected", False, 404, "policy_unknown", "it was bad"),
        ("reserved", False, 404, "policy_unknown", "not published"),
    ],
)
def test_outside_the_desired_set(
    state: str, was_current: bool, status: int, code: str, part: str
) -> None:
    row = version_row(1, state, was_current=was_current, reason="it was bad")  # type: ignore[arg-type] # parametrised
    view = line_view(others={1: row}, replicas=(replica_row("r0"),), residency=(acked("r0", 1),))

    verdict = prepare(view).judge("trl-policy-v1")

    assert isinstance(verdict, Refuse)
    assert (verdict.status, verdict.code) == (status, code)
    assert part in verdict.message


def test_what_the_view_does_not_cover_is_looked_up() -> None:
    gate = prepare(line_view(next_version=10))

    assert gate.judge("trl-policy-v1") == NotInView(1)
    assert gate.judge("trl-policy-v10") == NotInView(10)
    assert absent(gate, 10).status == 404


def test_a_contradicted_ack_does_not_count_until_a_new_one() -> None:
    rows = (replica_row("r0"), replica_row("r1"))
    before = line_view(replicas=rows, residency=(acked("r0", 3, seq=7), acked("r1", 3)))
    after = line_view(replicas=rows, residency=(acked("r0", 3, seq=9), acked("r1", 3)))
    mark = (Endpoint("r0", "1", "http://r0", 6, 7), 3)

    def served(view: LineSnapshot) -> list[str]:
        verdict = prepare(view, [mark]).judge("trl-policy-v3")
        assert isinstance(verdict, Serve)
        return [s.replica for s in verdict.endpoints]

    assert served(before) == ["r1"]
    assert served(after) == ["r0", "r1"]


STATES: tuple[ReplicaState, ...] = ("joined", "left", "lost")
REPLICAS = st.lists(
    st.tuples(st.sampled_from("123"), st.sampled_from(STATES)), min_size=1, max_size=4
)
ACKS = st.sets(st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from("123")))


@given(replicas=REPLICAS, acks=ACKS, asked=st.integers(1, 7))
def test_a_served_version_is_the_one_named_and_acked(
    replicas: list[tuple[str, ReplicaState]], acks: set[tuple[int, int, str]], asked: int
) -> None:
    rows: tuple[ReplicaRow, ...] = tuple(
        replica_row(f"r{n}", incarnation, state=state)
        for n, (incarnation, state) in enumerate(replicas)
    )
    residency: tuple[ResidencyRow, ...] = tuple(acked(f"r{n}", v, i) for n, v, i in sorted(acks))
    view = line_view(replicas=rows, residency=residency)

    verdict = prepare(view).judge(f"trl-policy-v{asked}")

    if isinstance(verdict, Serve):
        assert verdict.version == asked == parse_policy_name("trl-policy", verdict.name)
        assert {s.replica for s in verdict.endpoints} <= set(view.acked_by(asked))
        assert asked in {2, 3}
