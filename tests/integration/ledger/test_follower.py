"""The follower: signals, wake-ups and polls each lead to one more read; closing ends the wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db import filewatch
from policyline.ledger.db.follower import Follower

WITHIN_S = 20.0
NEVER_S = 3600.0


class Reader:
    """Puts each turn of a follower into a queue."""

    def __init__(self, follower: Follower) -> None:
        self.turns: queue.Queue[None] = queue.Queue()
        self.thread = threading.Thread(target=self._follow, args=(follower,), daemon=True)
        self.thread.start()

    def _follow(self, follower: Follower) -> None:
        for _ in follower:
            self.turns.put(None)

    def expect(self) -> None:
        self.turns.get(timeout=WITHIN_S)

    def drain(self) -> None:
        """Wait until it is quiet."""
        while True:
            try:
                self.turns.get(timeout=0.3)
            except queue.Empty:
                return


@contextmanager
def following(ledger: Ledger, poll_s: float | None) -> Iterator[tuple[Follower, Reader]]:
    follower = ledger.follow(poll_s=poll_s)
    reader = Reader(follower)
    try:
        yield follower, reader
    finally:
        follower.close()
        reader.thread.join(WITHIN_S)
        assert not reader.thread.is_alive()


def test_a_commit_leads_to_a_turn(ledger: Ledger, ledger_url: str) -> None:
    with Ledger(ledger_url) as other, following(ledger, NEVER_S) as (_, reader):
        reader.drain()
        other.open_run("r1")
        reader.expect()


def test_a_wake_up_leads_to_a_turn(ledger: Ledger) -> None:
    with following(ledger, NEVER_S) as (follower, reader):
        reader.drain()
        follower.wake()
        reader.expect()


def test_a_poll_is_the_fallback(ledger: Ledger) -> None:
    with following(ledger, 0.05) as (_, reader):
        for _ in range(5):
            reader.expect()


def test_one_that_is_closed_before_it_begins_has_no_turn(ledger: Ledger) -> None:
    follower = ledger.follow(poll_s=None)
    follower.close()
    assert list(follower) == []


def test_signals_that_cannot_be_had_are_replaced_by_polls(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_result: int, file: Path) -> None:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(filewatch, "_check", refuse)  # as with no inotify watch left
    with Ledger(sqlite_url) as ledger, following(ledger, 0.05) as (_, reader):
        for _ in range(5):
            reader.expect()
