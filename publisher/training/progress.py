"""Two clocks of asynchronous training: what the trainer has published, and what is current.

Staleness is counted from the first, rollouts ask for the second. A sync that has been handed over
is neither yet. Nothing unknown is taken for unserved: while the ledger is away, both stand still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import policy_name
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import ReplicaRow, ResidencyRow
from policyline.publisher.errors import NothingReady, PublishingHeld, TrainingStopped

_STEP_S = 0.5
"""How often a wait looks whether it should give up; what it waits for wakes it at once."""


class Clocks:
    """Where a trainer's syncs have got to. Thread-safe.

    Args:
        line: of the versions.
        max_staleness: versions that rollouts may be behind what is published.
        timeout_s: how long it may go on without progress.
        name: told which version of this trainer is current, and whether any replica serves it, at
            each change of the two.
        failure: what ended publishing, if something did.
        held: why publishing is held, if it is.
        foreign: replica -> what its server holds under a version's name that is not that version.
    """

    def __init__(
        self,
        line: str,
        *,
        max_staleness: int,
        timeout_s: float,
        name: Callable[[int, bool], None],
        failure: Callable[[], Exception | None],
        held: Callable[[], Exception | None],
        foreign: Callable[[int], Mapping[str, str]] = lambda _version: {},
    ) -> None:
        self._foreign = foreign
        self._line = line
        self._max_staleness = max_staleness
        self._timeout_s = timeout_s
        self._name = name
        self._failure = failure
        self._held = held
        self._changed = threading.Condition()
        self._sync_of: dict[int, int] = {}
        self._handed = -1
        self._published = -1
        self._current = -1
        self._named: tuple[int, bool] = (0, False)
        """The current version, as far as it is this trainer's, and whether it is served."""
        self._view: LineSnapshot | None = None
        self._since: float | None = None
        """When what was published began to wait for being served."""

    @property
    def handed_over(self) -> int:
        """The newest sync that was handed over; -1 before the first."""
        with self._changed:
            return self._handed

    @property
    def published(self) -> int | None:
        """The newest version that this trainer has published."""
        with self._changed:
            return max(self._sync_of, default=None)

    def newest(self) -> tuple[int, ...]:
        """The newest published version, for questions about it."""
        version = self.published
        return () if version is None else (version,)

    def hand_over(self, sync: int) -> None:
        """A sync was saved and handed to the publisher."""
        with self._changed:
            self._handed = sync

    def publish(self, sync: int, version: int) -> None:
        """A sync has become a version."""
        with self._changed:
            self._sync_of[version] = sync
            self._published = sync
            self._judge()

    def see(self, view: LineSnapshot) -> None:
        """The ledger as it is now."""
        current = view.current or 0
        with self._changed:
            self._view = view
            sync = self._sync_of.get(current)
            if sync is None:
                return
            named = (current, bool(view.acked_by(current)))
            told = named != self._named
            self._named = named
            if named[1] and sync > self._current:
                self._current = sync
                self._since = None
            self._judge()
            if told:
                self._name(*named)

    def check(self) -> None:
        """Whether training may go on with the rollouts it gets.

        Raises:
            TrainingStopped: for longer than the bound nothing is served, or only what is older
                than `max_staleness`.
        """
        with self._changed:
            if self._since is None or time.monotonic() - self._since <= self._timeout_s:
                return
            current, served = self._named
            if not served or max(self._sync_of) - current > self._max_staleness:
                raise self._nothing_ready()

    def wait_served(self, sync: int) -> None:
        """Wait until the version of this sync, or a later one, is current and served.

        Raises:
            TrainingStopped: it has not become so within the bound.
            Exception: what ended publishing.
        """
        self._wait(lambda: self._current >= sync and self._named[1])

    def wait_room(self) -> None:
        """Wait until one more sync leaves current at most `max_staleness` syncs behind.

        Raises:
            TrainingStopped: nothing has moved within the bound.
            Exception: what ended publishing.
        """
        most = max(self._max_staleness, 1)  # of 0, one sync at a time is what can be done
        self._wait(lambda: self._handed + 1 - self._current <= most)

    def _judge(self) -> None:
        if self._published <= self._current and self._named[1]:
            self._since = None
        elif self._since is None and self._published >= 0:
            self._since = time.monotonic()
        self._changed.notify_all()

    def notify(self) -> None:
        """Something that a wait asks about has changed."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            moved, since = self._place(), time.monotonic()
            while not condition():
                failure = self._failure()
                if failure is not None:
                    raise failure
                if self._place() != moved:
                    moved, since = self._place(), time.monotonic()
                if time.monotonic() - since > self._timeout_s:
                    raise self._stuck()
                self._changed.wait(min(_STEP_S, self._timeout_s))

    def _place(self) -> tuple[int, int]:
        return self._published, self._current

    def _stuck(self) -> TrainingStopped:
        held = self._held()
        if held is not None:
            waiting = self._handed - self._published
            return PublishingHeld(
                f"{waiting} syncs could not be published for {self._timeout_s:g} s: {held}",
                hint="bring it back and resume from the last checkpoint; nothing committed is lost",
            )
        return self._nothing_ready()

    def _nothing_ready(self) -> NothingReady:
        version = max(self._sync_of, default=None)
        if version is None or self._view is None:
            return NothingReady(
                f"nothing was published on line {self._line!r} for {self._timeout_s:g} s",
                hint="see whether ledger and storage answer: policyline doctor",
            )
        return NothingReady(
            f"{policy_name(self._line, version)} has not become ready within "
            f"{self._timeout_s:g} s: {why_not_ready(self._view, version, self._foreign(version))}",
            hint="run: policyline ledger status",
        )


def why_not_ready(
    view: LineSnapshot, version: int, foreign: Mapping[str, str] | None = None
) -> str:
    """What each replica says about a version, and what is in its way; pure."""
    if not view.replicas:
        return "no replica has joined the line (start `policyline sidecar` beside each server)"
    return "; ".join(
        f"{name}: {_says(replica, view.residency.get((name, version)), (foreign or {}).get(name))}"
        for name, replica in sorted(view.replicas.items())
    )


def _says(replica: ReplicaRow, said: ResidencyRow | None, foreign: str | None) -> str:
    if replica.state != "joined":
        return f"{replica.state}" + (f" ({replica.reason})" if replica.reason else "")
    if replica.incarnation is None:
        return "its vLLM server does not answer"
    if is_acked(replica, said):
        return "serves it"
    if said is None or (foreign is not None and said.state != "rejected"):
        return foreign or "has not fetched it"
    if said.state == "acked":
        return "served it before its vLLM server was restarted"
    failures = f" after {said.failures} failures" if said.failures else ""
    return f"{said.state}{failures}" + (f" ({said.reason})" if said.reason else "")
