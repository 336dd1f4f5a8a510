"""A trainer's reader of the ledger: woken by a signal, a call, and after the ledger was away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from policyline.ledger import EngineFacts, Ledger
from policyline.ledger.errors import LedgerUnavailable
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import DEFAULT_LINE
from policyline.publisher.training.snapshot_thread import SnapshotThread
from tests.integration.publisher.workspace import Workspace

WITHIN_S = 20.0
NO_POLL_S = 600.0
FACTS = EngineFacts("1000.5", "build", 6)


class Snapshots:
    """Collects snapshots; a test waits for one that it describes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last: LineSnapshot | None = None
        self.asked = 0

    def extra_versions(self) -> tuple[int, ...]:
        with self._changed:
            self.asked += 1
            self._changed.notify_all()
        return ()

    def add(self, snapshot: LineSnapshot) -> None:
        with self._changed:
            self._last = snapshot
            self._changed.notify_all()

    def wait(self, wanted: Callable[[LineSnapshot], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: self._last is not None and wanted(self._last), WITHIN_S
            )

    def wait_asked(self, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.asked >= times, WITHIN_S)


def test_a_commit_of_another_is_read_without_a_poll(workspace: Workspace, ledger: Ledger) -> None:
    snapshots = Snapshots()
    with Ledger(workspace.ledger) as own:
        thread = SnapshotThread(
            own,
            DEFAULT_LINE,
            extra_versions=snapshots.extra_versions,
            on_snapshot=snapshots.add,
            poll_s=NO_POLL_S,
        )
        try:
            snapshots.wait(lambda s: not s.replicas)
            ledger.join(DEFAULT_LINE, "r0", FACTS)
            snapshots.wait(lambda s: "r0" in s.replicas)
            before = snapshots.asked
            thread.wake()
            snapshots.wait_asked(before + 1)
        finally:
            thread.close()
        thread.close()  # again: nothing to do


class Unreachable(Ledger):
    """Does not answer as long as a test wants that."""

    down = True

    def view(self, *args: object, **kwargs: object) -> LineSnapshot:
        if self.down:
            raise LedgerUnavailable("down")
        return super().view(*args, **kwargs)  # type: ignore[arg-type]  # passed through


def test_an_unreachable_ledger_is_logged_once_and_read_again(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = Snapshots()
    with caplog.at_level(logging.WARNING), Unreachable(workspace.ledger) as own:
        thread = SnapshotThread(
            own,
            DEFAULT_LINE,
            extra_versions=snapshots.extra_versions,
            on_snapshot=snapshots.add,
            poll_s=0.01,
        )
        try:
            snapshots.wait_asked(3)
            own.down = False
            snapshots.wait(lambda s: not s.replicas)
        finally:
            thread.close()
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events.count("ledger_unreachable") == 1
