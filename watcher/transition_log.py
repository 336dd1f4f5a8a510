"""Logs each condition once when it begins and once when it ends."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from policyline.watcher.core.model import Pending
from policyline.watcher.metrics import SidecarMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that can fail for a while, and the log events of its two transitions."""

    failed: str
    """Event, and label of `policyline_errors_total`, when it begins."""
    recovered: str
    """Event when it ends."""


LEDGER_READ: Final = Condition("ledger_unreachable", "ledger_reachable")
LEDGER_WRITE: Final = Condition("ledger_write_failed", "ledger_write_recovered")
ENGINE_READ: Final = Condition("engine_unreachable", "engine_reachable")
GENERATION: Final = Condition("generation_stalled", "generation_resumed")
PAUSE: Final = Condition("pause_unsupported", "pause_supported")


class TransitionLog:
    """Remembers what was logged.

    Args:
        metrics: count the same conditions.
    """

    def __init__(self, metrics: SidecarMetrics) -> None:
        self._metrics = metrics
        self._failed: dict[Condition, str] = {}
        """What fails -> the kind of its cause when that was logged."""
        self._pending: dict[str, Pending] = {}

    def failed(self, condition: Condition, cause: str) -> None:
        """The condition holds; logged again for another kind of cause."""
        kind = cause.partition(":")[0]
        if self._failed.get(condition) != kind:
            self._failed[condition] = kind
            event = condition.failed
            log.warning("%s: %s", event.replace("_", " "), cause, extra={"event": event})
            self._metrics.errors.labels(event).inc()

    def recovered(self, condition: Condition) -> None:
        """The condition does not hold any more."""
        if self._failed.pop(condition, None) is not None:
            event = condition.recovered
            log.info("%s", event.replace("_", " "), extra={"event": event})

    def pending(self, pending: Collection[Pending], unserved: Collection[str]) -> None:
        """Log each version that has to wait, once for each kind of reason.

        Args:
            pending: those that wait now.
            unserved: names of all that are desired and not acked: while one of them is tried again
                it is not pending, and yet has nothing new to log when it is pending again.
        """
        self._metrics.set_pending(pending)
        for version in pending:
            former = self._pending.get(version.name)
            if former is None or former.reason != version.reason:
                log.warning(
                    "%s is not served: %s",
                    version.name,
                    version.why,
                    extra={
                        "event": "version_pending",
                        "adapter": version.name,
                        "reason": version.reason,
                    },
                )
        known = {**self._pending, **{version.name: version for version in pending}}
        self._pending = {name: known[name] for name in known if name in unserved}
