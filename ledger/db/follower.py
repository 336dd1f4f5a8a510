"""The one loop that follows a ledger: woken by signals, with a poll as the fallback."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final

from policyline.ledger.db.signals import Signal
from policyline.ledger.db.waker import Waker, is_readable

log = logging.getLogger(__name__)

_RELISTEN_S: Final = 2.0
"""Before a broken stream of signals is opened again."""


class Follower:
    """Says when to read the ledger again; made by `Ledger.follow`.

        for _ in ledger.follow(poll_s=5.0):
            read(ledger)

    It yields at once, at each signal, at each `wake`, and when `poll_s` seconds have passed since
    it last yielded. It reads nothing itself: the caller always reads again, since a signal only
    shortens the wait. A broken stream of signals is opened again, and never raises. The iteration
    blocks, so a daemon gives it a thread; it ends at `close`, and can be begun once.

    Args:
        signal: of the ledger.
        poll_s: longest wait in seconds; None for no poll.
        details: also wake for what leaves every desired set as it is (`events.DETAILS`). A hint:
            SQLite's signal does not say what was committed, so there everything wakes.
    """

    def __init__(self, signal: Signal, *, poll_s: float | None, details: bool = True) -> None:
        self._signal = signal
        self._poll_s = poll_s
        self._details = details
        self._closed = False
        self._waker: Waker | None = None

    def wake(self) -> None:
        """Yield now. From any thread."""
        if self._waker is not None:
            self._waker.notify()

    def close(self) -> None:
        """End the iteration, now or when the present turn is over. Idempotent; from any thread."""
        self._closed = True
        if self._waker is not None:
            self._waker.close()

    def __iter__(self) -> Iterator[None]:
        with Waker() as waker:
            self._waker = waker
            while not (self._closed or waker.closed):
                try:
                    yield from self._signal.listen(
                        waker, details=self._details, timeout_s=self._poll_s
                    )
                except Exception as error:  # noqa: BLE001 - whatever breaks a wait, polls go on
                    log.debug("no signals from the ledger for now: %s", error)
                    yield from self._polled(waker)

    def _polled(self, waker: Waker) -> Iterator[None]:
        """Turns without signals, until it is time to try them again."""
        again_s = time.monotonic() + _RELISTEN_S
        yield
        while (left_s := again_s - time.monotonic()) > 0 and not waker.closed:
            wait_s = left_s if self._poll_s is None else min(left_s, self._poll_s)
            if is_readable(wait_s, waker.fileno()) or self._poll_s is not None:
                waker.clear()
                yield
