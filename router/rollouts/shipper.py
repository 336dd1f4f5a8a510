"""Ships noted rollouts to the ledger in batches, off the path of any request."""

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

_BACK_OFF_MOST_S: Final = 10.0


class Shipper:
    """Sends sealed batches, oldest first, each by its key: once, however often it is tried.

    Args:
        settings: of the router.
        ledger: gets them.
        spool: has them.
    """

    def __init__(self, settings: RouterSettings, ledger: Ledger, spool: Spool) -> None:
        self._settings = settings
        self._ledger = ledger
        self._spool = spool
        self._failures = 0
        self._stopping = asyncio.Event()
        self.shipped = 0
        """Rollouts that the ledger took from us."""
        self.waiting = 0
        """Sealed batches that it does not have yet."""

    async def run(self) -> None:
        """Ship until `stop`, and then once more."""
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._stopping.wait()
            await self.ship()

    def stop(self) -> None:
        """Have `run` end when it has shipped what there is."""
        self._stopping.set()

    async def ship(self) -> bool:
        """Ship all there is; False when the ledger is away."""
        self._spool.seal()
        batches = self._spool.sealed()
        self.waiting = len(batches)
        for batch in batches:
            try:
                count = await asyncio.to_thread(self._send, batch)
            except LedgerUnavailable as error:
                self._failures += 1
                if self._failures == 1:
                    log.warning("rollouts wait: %s", error, extra={"event": "rollouts_wait"})
                return False
            except LedgerError as error:
                path = self._spool.put_aside(batch)
                log.error(  # noqa: TRY400 - the ledger's text says all
                    "the ledger refuses %s: %s", path, error, extra={"event": "rollouts_refused"}
                )
            else:
                self._failures = 0
                self.shipped += count
            self.waiting -= 1
        return True

    def _send(self, batch: str) -> int:
        rollouts = self._spool.read(batch)
        self._ledger.record_rollouts(self._settings.line, batch, rollouts)
        self._spool.remove(batch)
        return len(rollouts)

    def _pause_s(self) -> float:
        pause_s = self._settings.ship_interval_s
        return float(min(pause_s * 2**self._failures, max(pause_s, _BACK_OFF_MOST_S)))
