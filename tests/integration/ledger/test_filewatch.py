"""Waiting for a file: every touch wakes, a removed file is watched again, closing ends the wait."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.ledger.db.filewatch import changes
from policyline.ledger.db.waker import Waker

WITHIN_S = 10.0


class Watch:
    """A thread that reports each wake in a queue."""

    def __init__(self, file: Path) -> None:
        self.wakes: queue.Queue[None] = queue.Queue()
        self.waker = Waker()
        self.thread = threading.Thread(target=self._run, args=(file,), daemon=True)
        self.thread.start()
        self.expect_wake()  # the watch has begun

    def _run(self, file: Path) -> None:
        with self.waker:
            for _ in changes(file, self.waker):
                self.wakes.put(None)

    def expect_wake(self) -> None:
        self.wakes.get(timeout=WITHIN_S)

    def drain(self) -> None:
        while not self.wakes.empty():
            self.wakes.get()


@pytest.fixture
def signal_file(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db.signal"


@pytest.fixture
def watch(signal_file: Path) -> Iterator[Watch]:
    started = Watch(signal_file)
    yield started
    started.waker.close()
    started.thread.join(WITHIN_S)


def test_each_touch_wakes(watch: Watch, signal_file: Path) -> None:
    for _ in range(5):
        watch.drain()
        signal_file.touch()
        watch.expect_wake()


def test_a_removed_file_is_watched_again(watch: Watch, signal_file: Path) -> None:
    signal_file.unlink()
    watch.expect_wake()
    watch.drain()

    signal_file.touch()

    watch.expect_wake()


def test_a_notification_wakes(watch: Watch) -> None:
    watch.drain()

    watch.waker.notify()

    watch.expect_wake()


def test_closing_the_waker_ends_a_quiet_wait(watch: Watch) -> None:
    watch.waker.close()

    watch.thread.join(WITHIN_S)

    assert not watch.thread.is_alive()


def test_a_place_that_cannot_hold_the_file_is_an_error(tmp_path: Path) -> None:
    with Waker() as waker, pytest.raises(OSError, match="No such file"):
        next(changes(tmp_path / "absent" / "signal", waker))
