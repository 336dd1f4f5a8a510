"""The two clocks: what was published, and what is current and served."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow
from policyline.publisher.errors import NothingReady, PublishingHeld
from policyline.publisher.training.progress import Clocks, why_not_ready

LINE = "p"
WITHIN_S = 20.0


class Told:
    """What the clocks said to name, and what they are told of publishing."""

    def __init__(self) -> None:
        self.named: list[tuple[int, bool]] = []
        self.failure: Exception | None = None
        self.held: Exception | None = None

    def name(self, version: int, served: bool) -> None:
        self.named.append((version, served))


def clocks(told: Told, *, max_staleness: int = 4, timeout_s: float = WITHIN_S) -> Clocks:
    return Clocks(
        LINE,
        max_staleness=max_staleness,
        timeout_s=timeout_s,
        name=told.name,
        failure=lambda: told.failure,
        held=lambda: told.held,
    )


def replica(name: str, **changes: object) -> ReplicaRow:
    row = ReplicaRow(LINE, name, 1, "joined", "1.0", "http://r", "b", 6, 1, "t")
    return replace(row, **changes)  # type: ignore[arg-type]  # the tests' own field names


def acked(name: str, version: int, **changes: object) -> ResidencyRow:
    row = ResidencyRow(LINE, name, version, "acked", 1, "1.0", "d")
    return replace(row, **changes)  # type: ignore[arg-type]  # the tests' own field names


def view(current: int | None, *rows: ResidencyRow) -> LineSnapshot:
    return LineSnapshot(
        ledger_id="l",
        seq=1,
        line=LineRow(LINE, current=current),
        run=None,
        desired=(),
        replicas={"r0": replica("r0")},
        residency={(r.replica, r.version): r for r in rows},
    )


def test_what_another_ledger_loaded_under_the_name_is_the_reason() -> None:
    assert why_not_ready(view(None), 3, {"r0": "its vLLM serves '/x'"}) == (
        "r0: its vLLM serves '/x'"
    )
    assert why_not_ready(view(3, acked("r0", 3)), 3, {"r0": "in the way"}) == "r0: serves it"


def test_only_what_is_current_and_served_is_named_and_only_of_this_trainer() -> None:
    told = Told()
    clock = clocks(told)
    clock.see(view(6, acked("r0", 6)))  # of a trainer before
    clock.hand_over(0)
    clock.publish(0, 7)
    clock.see(view(6, acked("r0", 6), acked("r0", 7)))  # served, but not current yet
    assert told.named == []
    clock.see(view(7, acked("r0", 7)))
    clock.see(view(7, acked("r0", 7)))
    assert told.named == [(7, True)]
    clock.see(view(7, acked("r0", 7, incarnation="0.9")))  # its server was restarted
    assert told.named[-1] == (7, False)
    clock.see(view(7, acked("r0", 7)))
    assert told.named[-1] == (7, True)
    assert clock.published == 7


def test_the_first_wait_ends_when_the_version_is_served() -> None:
    clock = clocks(Told())
    clock.hand_over(0)
    waiter = threading.Thread(target=lambda: clock.wait_served(0))
    waiter.start()
    clock.publish(0, 3)
    clock.see(view(3, acked("r0", 3)))
    waiter.join(WITHIN_S)
    assert not waiter.is_alive()


def test_syncs_may_run_ahead_of_current_by_the_staleness_alone() -> None:
    clock = clocks(Told(), max_staleness=2, timeout_s=0.05)
    for sync in (0, 1):
        clock.hand_over(sync)
        clock.publish(sync, sync + 1)
    clock.see(view(1, acked("r0", 1)))
    clock.wait_room()  # a third sync leaves current two behind
    clock.hand_over(2)
    clock.publish(2, 3)
    with pytest.raises(
        NothingReady, match=r"p-v3 has not become ready within 0\.05 s: r0: has not"
    ):
        clock.wait_room()
    clock.see(view(3, acked("r0", 3)))
    clock.wait_room()


def test_with_no_staleness_one_sync_at_a_time() -> None:
    clock = clocks(Told(), max_staleness=0, timeout_s=0.05)
    clock.hand_over(0)
    clock.publish(0, 1)
    clock.see(view(1, acked("r0", 1)))
    clock.wait_room()
    clock.hand_over(1)
    with pytest.raises(NothingReady):
        clock.wait_room()


def test_while_publishing_is_held_the_cause_is_what_stops_training() -> None:
    told = Told()
    clock = clocks(told, max_staleness=1, timeout_s=0.05)
    clock.hand_over(0)
    clock.publish(0, 1)
    clock.see(view(1, acked("r0", 1)))
    clock.hand_over(1)
    told.held = OSError("the bucket is gone")
    clock.check()  # what is served is fresh enough
    with pytest.raises(PublishingHeld, match=r"1 syncs could not be published .*bucket is gone"):
        clock.wait_room()


def test_what_ended_publishing_ends_a_wait() -> None:
    told = Told()
    clock = clocks(told)
    told.failure = ValueError("fenced")
    with pytest.raises(ValueError, match="fenced"):
        clock.wait_served(0)


def test_rollouts_that_are_too_old_stop_training_and_fresh_ones_do_not() -> None:
    clock = clocks(Told(), max_staleness=1, timeout_s=0.0)
    clock.hand_over(0)
    clock.publish(0, 1)
    clock.see(view(1, acked("r0", 1)))
    clock.publish(1, 2)
    clock.see(view(1, acked("r0", 1)))
    clock.check()
    clock.publish(2, 3)
    with pytest.raises(NothingReady):
        clock.check()


def test_nothing_served_stops_training() -> None:
    clock = clocks(Told(), timeout_s=0.0)
    clock.publish(0, 1)
    clock.see(view(1))
    with pytest.raises(NothingReady):
        clock.check()


def test_every_replica_says_why() -> None:
    lonely = replace(view(None), replicas={})
    assert "no replica has joined" in why_not_ready(lonely, 3)
    rows = {
        "gone": (replica("gone", state="lost", reason="no heartbeat"), None),
        "off": (replica("off", incarnation=None), None),
        "quiet": (replica("quiet"), None),
        "bad": (replica("bad"), acked("bad", 3, state="rejected", failures=2, reason="rank 16")),
        "old": (replica("old"), acked("old", 3, incarnation="0.1")),
        "good": (replica("good"), acked("good", 3)),
    }
    seen = replace(
        view(None),
        replicas={name: row for name, (row, _) in rows.items()},
        residency={(name, 3): said for name, (_, said) in rows.items() if said},
    )
    assert why_not_ready(seen, 3) == (
        "bad: rejected after 2 failures (rank 16); gone: lost (no heartbeat); good: serves it; "
        "off: its vLLM server does not answer; "
        "old: served it before its vLLM server was restarted; quiet: has not fetched it"
    )


def test_a_foreign_adapter_is_the_reason_unless_the_version_itself_was_refused() -> None:
    foreign = {"r0": "its vLLM serves '/other' under that name"}
    refused = acked("r0", 1, state="rejected", reason="rank 16")

    assert why_not_ready(view(None), 1, foreign) == "r0: its vLLM serves '/other' under that name"
    assert why_not_ready(view(None, refused), 1, foreign) == "r0: rejected (rank 16)"
