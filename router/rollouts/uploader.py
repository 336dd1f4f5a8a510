"""Uploads recorded rollouts to the ledger in batches, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from policyline.ledger.errors import LedgerError, LedgerUnavailable
from policyline.ledger.store import Ledger
from policyline.router.rollouts.spool import Spool
from policyline.router.settings import RouterSettings

log = logging.getLogger(__name__)

_MAX_BACK_OFF_S: Final = 10.0


class Uploader:
    """Uploads sealed batches, oldest first. The key of a batch makes retries idempotent.

    Args:
        settings: of the router.
        ledger: that records them.
        spool: that holds them.
    """

    def __init__(self, settings: RouterSettings, ledger: Ledger, spool: Spool) -> None:
        self._settings = settings
        self._ledger = ledger
        self._spool = spool
        self._failures = 0
        self._stopping = asyncio.Event()
        self.uploaded = 0
        """Rollouts that the ledger accepted from this process."""
        self.waiting = 0
        """Sealed batches that the ledger does not have yet."""

    async def run(self) -> None:
        """Upload until `stop`, and then once more."""
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._stopping.wait()
            await self.upload()

    def stop(self) -> None:
        """Make `run` end after a last upload."""
        self._stopping.set()

    async def upload(self) -> None:
        """Upload all batches, as far as the ledger can be reached."""
        self._spool.seal()
        batches = self._spool.sealed()
        self.waiting = len(batches)
        for batch in batches:
            try:
                count = await asyncio.to_thread(self._send, batch)
            except LedgerUnavailable as error:
                self._failures += 1
                if self._failures == 1:
                    log.warning(
                        "rollouts cannot be uploaded: %s",
                        error,
                        extra={"event": "rollouts_pending"},
                    )
                return
            except LedgerError as error:
                path = self._spool.quarantine(batch)
                log.error(  # noqa: TRY400 - the ledger's message is enough
                    "the ledger refuses %s: %s", path, error, extra={"event": "rollouts_refused"}
                )
            else:
                self._failures = 0
                self.uploaded += count
            self.waiting -= 1

    def _send(self, batch: str) -> int:
        rollouts = self._spool.read(batch)
        self._ledger.record_rollouts(self._settings.line, batch, rollouts)
        self._spool.remove(batch)
        return len(rollouts)

    def _pause_s(self) -> float:
        pause_s = self._settings.ship_interval_s
        return float(min(pause_s * 2**self._failures, max(pause_s, _MAX_BACK_OFF_S)))
