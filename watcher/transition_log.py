"""What is worth a line in the log, said once when it begins and once when it ends."""

from __future__ import annotations

import logging
from collections.abc import Collection

from policyline.watcher.core.model import Held
from policyline.watcher.metrics import Metrics

log = logging.getLogger(__name__)


class News:
    """Remembers what was said.

    Args:
        metrics: count the same things.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._away: dict[str, str] = {}
        """What is away -> the kind of its cause when that was told."""
        self._held: dict[str, Held] = {}

    def away(self, what: str, cause: str) -> None:
        """Something cannot be reached or does not work; told again for another kind of cause."""
        kind = cause.partition(":")[0]
        if self._away.get(what) != kind:
            self._away[what] = kind
            shown = what.replace("_", " ")
            log.warning("%s away: %s", shown, cause, extra={"event": f"{what}_away"})
            self._metrics.errors.labels(f"{what}_away").inc()

    def back(self, what: str) -> None:
        """It can be reached again."""
        if self._away.pop(what, None) is not None:
            log.info("%s back", what.replace("_", " "), extra={"event": f"{what}_back"})

    def held(self, held: Collection[Held], unserved: Collection[str]) -> None:
        """The versions that have to wait now; each is told once for each kind of reason.

        Args:
            held: those that wait.
            unserved: names of all that are desired and not acked: while one of them is tried again
                it does not wait, and yet has nothing new to tell when it waits again.
        """
        self._metrics.hold(held)
        for version in held:
            former = self._held.get(version.name)
            if former is None or former.reason != version.reason:
                log.warning(
                    "%s is not served: %s",
                    version.name,
                    version.why,
                    extra={"event": "held", "adapter": version.name, "reason": version.reason},
                )
        told = {**self._held, **{version.name: version for version in held}}
        self._held = {name: told[name] for name in told if name in unserved}
