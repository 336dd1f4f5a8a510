"""Publishing behind the training step: one version in flight, one waiting, the newest wins."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from policyline.ledger.errors import LedgerUnavailable
from policyline.publisher.model import Published
from policyline.storage import StorageFull, StorageUnavailable, StorageUnwritable

log = logging.getLogger(__name__)

TRANSIENT: Final = (LedgerUnavailable, StorageUnavailable, StorageUnwritable, StorageFull)
"""Errors that may pass: publishing is tried again. Any other error ends it."""
_BACKOFF_FIRST_S: Final = 0.25
_BACKOFF_MAX_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Saved:
    """An adapter that is saved and not published yet."""

    sync: int
    """Number of the trainer's sync, counted from 0; each is one update of the policy."""
    directory: Path
    """As PEFT saves it; removed once it is published or replaced by a newer one."""
    metadata: Mapping[str, Any]
    phases: Mapping[str, float]
    """Seconds that the trainer spent before: `train_step`, `gather`, `save`."""
    reference: Future[list[float]] | None = None
    """The trainer's own log-probabilities for the probe, if it scores them."""


class PublishThread:
    """Publishes saved adapters in a thread of its own. Of those that wait, only the newest.

    A version number is reserved when publishing begins, so an adapter that is replaced while it
    waits costs none. While ledger or storage are unavailable, publishing is tried again with
    back-off: 0.25 s, doubled up to 10 s. Any other error ends it and stays in `failure`.

    Args:
        publish: does the work; called in the thread, with the number of failed attempts since the
            last success.
        on_published: called in the thread after each publication.
    """

    def __init__(
        self,
        publish: Callable[[Saved, int], Published],
        on_published: Callable[[Saved, Published], None],
    ) -> None:
        self._publish = publish
        self._on_published = on_published
        self._changed = threading.Condition()
        self._waiting: Saved | None = None
        self._in_flight: Saved | None = None
        self._closing = False
        self.blocked: Exception | None = None
        """Why the last attempt failed, while it is tried again; None otherwise."""
        self.failure: Exception | None = None
        """What ended publishing; None while it goes on."""
        self._thread = threading.Thread(target=self._run, name="policyline-publish", daemon=True)
        self._thread.start()

    def submit(self, saved: Saved) -> None:
        """Publish this next; one that still waits is dropped. Returns at once."""
        with self._changed:
            replaced, self._waiting = self._waiting, saved
            self._changed.notify_all()
        if replaced is not None:
            _discard(replaced)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight or waiting, or publishing has ended with an error.

        Returns:
            Whether that was within `timeout_s` seconds.
        """
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish what is in flight, drop what waits, end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            dropped, self._waiting = self._waiting, None
            self._changed.notify_all()
        if dropped is not None:
            _discard(dropped)
        self._thread.join(timeout_s)

    def _is_idle(self) -> bool:
        return self.failure is not None or (self._waiting is None and self._in_flight is None)

    def _run(self) -> None:
        attempts = 0
        while (saved := self._take()) is not None:
            try:
                published = self._publish(saved, attempts)
            except TRANSIENT as error:
                self._back_off(saved, error, attempts)
                attempts += 1
            except Exception as error:
                log.exception("publishing has failed", extra={"event": "publishing_failed"})
                self._end(error)
                return
            else:
                attempts = 0
                self._finish(saved, published)

    def _take(self) -> Saved | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closing)
            self._in_flight, self._waiting = self._waiting, None
            return self._in_flight

    def _finish(self, saved: Saved, published: Published) -> None:
        _discard(saved)
        self._on_published(saved, published)
        with self._changed:
            self.blocked = None
            self._in_flight = None
            self._changed.notify_all()

    def _back_off(self, saved: Saved, error: Exception, attempts: int) -> None:
        """Wait before the next attempt, which takes the newest adapter there is by then."""
        if attempts == 0:
            log.warning("publishing is blocked: %s", error, extra={"event": "publishing_blocked"})
        pause_s = min(_BACKOFF_FIRST_S * 2**attempts, _BACKOFF_MAX_S)
        with self._changed:
            self.blocked = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing, pause_s)
            newer = self._waiting is not None or self._closing
            if not newer:
                self._waiting = saved
            self._in_flight = None
        if newer:
            _discard(saved)

    def _end(self, error: Exception) -> None:
        with self._changed:
            self.failure = error
            self._in_flight = None
            self._changed.notify_all()


def _discard(saved: Saved) -> None:
    shutil.rmtree(saved.directory, ignore_errors=True)
