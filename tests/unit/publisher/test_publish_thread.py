"""Publishing behind a trainer: order, replacement, back-off, failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.ledger.errors import LedgerUnavailable, StaleEpoch
from policyline.publisher.model import Published
from policyline.publisher.training.publish_thread import PublishThread, Saved

WITHIN_S = 20.0


class Gate:
    """Publishing that waits to be let through, and can be made to fail."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.errors: list[Exception] = []
        self.tried: list[tuple[int, int]] = []
        self.done: list[int] = []

    def publish(self, saved: Saved, attempt: int) -> Published:
        self.tried.append((saved.sync, attempt))
        self.begun.set()
        assert self.go.wait(WITHIN_S)
        if self.errors:
            raise self.errors.pop(0)
        return Published(saved.sync + 1, f"v{saved.sync + 1}", "", 0, "")

    def finished(self, saved: Saved, published: Published) -> None:
        self.done.append(published.version)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def thread(gate: Gate) -> Iterator[PublishThread]:
    thread = PublishThread(gate.publish, gate.finished)
    yield thread
    gate.go.set()
    thread.close(WITHIN_S)


def saved(root: Path, sync: int) -> Saved:
    directory = root / str(sync)
    directory.mkdir()
    return Saved(sync, directory, {}, {})


def test_of_those_that_wait_only_the_newest_is_published(
    gate: Gate, thread: PublishThread, tmp_path: Path
) -> None:
    thread.submit(saved(tmp_path, 0))
    assert gate.begun.wait(WITHIN_S)
    for sync in (1, 2, 3):
        thread.submit(saved(tmp_path, sync))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "3"]  # those replaced are gone
    gate.go.set()
    assert thread.drain(WITHIN_S)
    assert gate.tried == [(0, 0), (3, 0)]
    assert gate.done == [1, 4]
    assert list(tmp_path.iterdir()) == []


def test_a_transient_error_is_tried_again(
    gate: Gate, thread: PublishThread, tmp_path: Path
) -> None:
    gate.errors = [LedgerUnavailable("gone"), LedgerUnavailable("gone still")]
    gate.go.set()
    thread.submit(saved(tmp_path, 0))
    assert thread.drain(WITHIN_S)
    assert gate.tried == [(0, 0), (0, 1), (0, 2)]
    assert thread.blocked is None
    assert thread.failure is None


def test_a_newer_one_replaces_one_that_is_blocked(
    gate: Gate, thread: PublishThread, tmp_path: Path
) -> None:
    gate.errors = [LedgerUnavailable("gone")]
    thread.submit(saved(tmp_path, 0))
    assert gate.begun.wait(WITHIN_S)
    thread.submit(saved(tmp_path, 1))
    gate.go.set()
    assert thread.drain(WITHIN_S)
    assert gate.tried == [(0, 0), (1, 1)]
    assert gate.done == [2]


def test_any_other_failure_ends_it(gate: Gate, thread: PublishThread, tmp_path: Path) -> None:
    fenced = StaleEpoch("over", holder="somebody", since="")
    gate.errors = [fenced]
    gate.go.set()
    thread.submit(saved(tmp_path, 0))
    assert thread.drain(WITHIN_S)
    assert thread.failure is fenced
    thread.submit(saved(tmp_path, 1))  # nobody takes it
    assert gate.tried == [(0, 0)]


def test_closing_finishes_what_is_in_flight_and_drops_what_waits(
    gate: Gate, thread: PublishThread, tmp_path: Path
) -> None:
    thread.submit(saved(tmp_path, 0))
    assert gate.begun.wait(WITHIN_S)
    thread.submit(saved(tmp_path, 1))
    gate.go.set()
    thread.close(WITHIN_S)
    assert gate.done in ([1], [1, 2])  # the second only if it was begun before the close
    assert list(tmp_path.iterdir()) == []
