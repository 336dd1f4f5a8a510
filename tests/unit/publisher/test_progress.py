"""What a trainer has submitted and published, and what is current and served."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow
from policyline.publisher.errors import NothingReady, PublishingBlocked
from policyline.publisher.training.progress import SyncProgress, why_not_ready

LINE = "p"
WITHIN_S = 20.0


class Callbacks:
    """What was reported as current, and what publishing is doing."""

    def __init__(self) -> None:
        self.current: list[tuple[int, bool]] = []
        self.failure: Exception | None = None
        self.blocked: Exception | None = None

    def on_current(self, version: int, served: bool) -> None:
        self.current.append((version, served))


def new_progress(
    callbacks: Callbacks, *, max_staleness: int = 4, timeout_s: float = WITHIN_S
) -> SyncProgress:
    return SyncProgress(
        LINE,
        max_staleness=max_staleness,
        timeout_s=timeout_s,
        on_current=callbacks.on_current,
        failure=lambda: callbacks.failure,
        blocked=lambda: callbacks.blocked,
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


def test_an_adapter_of_another_ledger_under_the_name_is_the_reason() -> None:
    assert why_not_ready(view(None), 3, {"r0": "its vLLM serves '/x'"}) == (
        "r0: its vLLM serves '/x'"
    )
    assert why_not_ready(view(3, acked("r0", 3)), 3, {"r0": "in the way"}) == "r0: serves it"


def test_only_this_trainers_current_version_is_reported() -> None:
    callbacks = Callbacks()
    progress = new_progress(callbacks)
    progress.update(view(6, acked("r0", 6)))  # of a trainer before
    progress.note_submitted(0)
    progress.note_published(0, 7)
    progress.update(view(6, acked("r0", 6), acked("r0", 7)))  # served, but not current yet
    assert callbacks.current == []
    progress.update(view(7, acked("r0", 7)))
    progress.update(view(7, acked("r0", 7)))
    assert callbacks.current == [(7, True)]
    progress.update(view(7, acked("r0", 7, incarnation="0.9")))  # its server was restarted
    assert callbacks.current[-1] == (7, False)
    progress.update(view(7, acked("r0", 7)))
    assert callbacks.current[-1] == (7, True)
    assert progress.published_versions() == (7,)


def test_the_first_wait_ends_when_the_version_is_served() -> None:
    progress = new_progress(Callbacks())
    progress.note_submitted(0)
    waiter = threading.Thread(target=lambda: progress.wait_served(0))
    waiter.start()
    progress.note_published(0, 3)
    progress.update(view(3, acked("r0", 3)))
    waiter.join(WITHIN_S)
    assert not waiter.is_alive()


def test_syncs_run_ahead_of_current_by_at_most_max_staleness() -> None:
    progress = new_progress(Callbacks(), max_staleness=2, timeout_s=0.05)
    for sync in (0, 1):
        progress.note_submitted(sync)
        progress.note_published(sync, sync + 1)
    progress.update(view(1, acked("r0", 1)))
    progress.wait_room()  # a third sync leaves current two behind
    progress.note_submitted(2)
    progress.note_published(2, 3)
    with pytest.raises(
        NothingReady, match=r"p-v3 has not become ready within 0\.05 s: r0: has not"
    ):
        progress.wait_room()
    progress.update(view(3, acked("r0", 3)))
    progress.wait_room()


def test_with_no_staleness_one_sync_at_a_time() -> None:
    progress = new_progress(Callbacks(), max_staleness=0, timeout_s=0.05)
    progress.note_submitted(0)
    progress.note_published(0, 1)
    progress.update(view(1, acked("r0", 1)))
    progress.wait_room()
    progress.note_submitted(1)
    with pytest.raises(NothingReady):
        progress.wait_room()


def test_while_publishing_is_blocked_its_cause_stops_training() -> None:
    callbacks = Callbacks()
    progress = new_progress(callbacks, max_staleness=1, timeout_s=0.05)
    progress.note_submitted(0)
    progress.note_published(0, 1)
    progress.update(view(1, acked("r0", 1)))
    progress.note_submitted(1)
    callbacks.blocked = OSError("the bucket is gone")
    progress.check()  # what is served is fresh enough
    with pytest.raises(PublishingBlocked, match=r"1 syncs could not be published .*bucket is gone"):
        progress.wait_room()


def test_a_failure_of_publishing_ends_a_wait() -> None:
    callbacks = Callbacks()
    progress = new_progress(callbacks)
    callbacks.failure = ValueError("fenced")
    with pytest.raises(ValueError, match="fenced"):
        progress.wait_served(0)


def test_rollouts_that_are_too_old_stop_training_and_fresh_ones_do_not() -> None:
    progress = new_progress(Callbacks(), max_staleness=1, timeout_s=0.0)
    progress.note_submitted(0)
    progress.note_published(0, 1)
    progress.update(view(1, acked("r0", 1)))
    progress.note_published(1, 2)
    progress.update(view(1, acked("r0", 1)))
    progress.check()
    progress.note_published(2, 3)
    with pytest.raises(NothingReady):
        progress.check()


def test_nothing_served_stops_training() -> None:
    progress = new_progress(Callbacks(), timeout_s=0.0)
    progress.note_published(0, 1)
    progress.update(view(1))
    with pytest.raises(NothingReady):
        progress.check()


def test_a_reason_is_given_for_every_replica() -> None:
    lonely = replace(view(None), replicas={})
    assert "no replica has joined" in why_not_ready(lonely, 3, {})
    rows = {
        "gone": (replica("gone", state="lost", reason="no heartbeat"), None),
        "off": (replica("off", incarnation=None), None),
        "quiet": (replica("quiet"), None),
        "bad": (replica("bad"), acked("bad", 3, state="rejected", failures=2, reason="rank 16")),
        "old": (replica("old"), acked("old", 3, incarnation="0.1")),
        "good": (replica("good"), acked("good", 3)),
    }
    snapshot = replace(
        view(None),
        replicas={name: row for name, (row, _) in rows.items()},
        residency={(name, 3): reported for name, (_, reported) in rows.items() if reported},
    )
    assert why_not_ready(snapshot, 3, {}) == (
        "bad: rejected after 2 failures (rank 16); gone: lost (no heartbeat); good: serves it; "
        "off: its vLLM server does not answer; "
        "old: served it before its vLLM server was restarted; quiet: has not fetched it"
    )


def test_a_foreign_adapter_is_the_reason_unless_the_version_itself_was_refused() -> None:
    foreign = {"r0": "its vLLM serves '/other' under that name"}
    refused = acked("r0", 1, state="rejected", reason="rank 16")

    assert why_not_ready(view(None), 1, foreign) == "r0: its vLLM serves '/other' under that name"
    assert why_not_ready(view(None, refused), 1, foreign) == "r0: rejected (rank 16)"
