"""What is worth a line in the log, said once when it begins and once when it ends."""

from __future__ import annotations

import logging
from collections.abc import Collection

from watcher.metrics import Metrics
from watcher.model import Held

log = logging.getLogger(__name__)


class News:
    """Remembers what was said.

    Args:
        metrics: count the same things.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._away: set[str] = set()
        self._held: dict[str, Held] = {}

    def away(self, what: str, cause: str) -> None:
        """Something cannot be reached or does not work."""
        if what not in self._away:
            self._away.add(what)
            shown = what.replace("_", " ")
            log.warning("%s away: %s", shown, cause, extra={"event": f"{what}_away"})
            self._metrics.errors.labels(f"{what}_away").inc()

    def back(self, what: str) -> None:
        """It can be reached again."""
        if what in self._away:
            self._away.remove(what)
            log.info("%s back", what.replace("_", " "), extra={"event": f"{what}_back"})

    def held(self, held: Collection[Held]) -> None:
        """The versions that have to wait now; each is told once for each kind of reason."""
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
        self._held = {version.name: version for version in held}
