"""The ledger's signals, delivered before the injected clock moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from sqlalchemy.engine import Connection

from policyline.ledger.db.waker import Waker
from tests.simulation.watcher.clock import Turns

_LOOK_S = 0.05
"""Real time between two looks of a quiet listener at whether it should stop."""
LISTENER = "ledger-signals"
"""Name of the watcher's thread that waits for signals."""


class _Box:
    def __init__(self) -> None:
        self.rung = threading.Event()
        self.idle = threading.Event()


class Bus:
    """A `policyline.ledger.db.signals.Signal` within one process.

    Args:
        turns: a signal is passed on in the listener's turn only.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._boxes: dict[threading.Thread, _Box] = {}

    def in_transaction(self, connection: Connection) -> None:
        """Nothing: the signal follows the commit."""

    def after_commit(self) -> None:
        for box in list(self._boxes.values()):
            box.idle.clear()
            box.rung.set()

    def listen(
        self, waker: Waker, *, details: bool = True, timeout_s: float | None = None
    ) -> Iterator[None]:
        thread, box = threading.current_thread(), _Box()
        self._boxes[thread] = box
        try:
            self._turns.wait()
            yield
            box.idle.set()
            while not waker.closed:
                if box.rung.wait(_LOOK_S):
                    box.idle.clear()
                    box.rung.clear()
                    self._turns.wait()
                    yield
                    box.idle.set()
        finally:
            del self._boxes[thread]

    def is_settled(self, thread: threading.Thread) -> bool:
        """Whether a listener has passed on every signal so far."""
        box = self._boxes.get(thread)
        return box is not None and box.idle.is_set() and not box.rung.is_set()
