"""How far a trainer's syncs have got: submitted, published, current.

Staleness counts from what is published. Rollouts ask for what is current. A sync that was
submitted is neither yet. While the ledger is unavailable nothing changes here: what is not known
is not taken for unserved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import policy_name
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import ReplicaRow, ResidencyRow
from policyline.publisher.errors import NothingReady, PublishingBlocked, TrainingStopped

_CHECK_S = 0.5
"""How often a wait checks whether it must give up. What it waits for wakes it at once."""


class SyncProgress:
    """The newest sync that was submitted, published, and became current. Thread-safe.

    Args:
        line: prefix of the versions' names.
        max_staleness: how many versions rollouts may be behind what is published.
        timeout_s: seconds that training may go on, or wait, without progress.
        on_current: called with the current version, if it is this trainer's, and with whether any
            replica serves it; at each change of the two, in the caller's thread of `update`.
        failure: returns what ended publishing; None while it goes on.
        blocked: returns why publishing cannot go on at the moment; None when it can.
        foreign: for a version, replica -> what else its server holds under the version's name.
    """

    def __init__(
        self,
        line: str,
        *,
        max_staleness: int,
        timeout_s: float,
        on_current: Callable[[int, bool], None],
        failure: Callable[[], Exception | None],
        blocked: Callable[[], Exception | None],
        foreign: Callable[[int], Mapping[str, str]] = lambda _version: {},
    ) -> None:
        self._foreign = foreign
        self._line = line
        self._max_staleness = max_staleness
        self._timeout_s = timeout_s
        self._on_current = on_current
        self._failure = failure
        self._blocked = blocked
        self._changed = threading.Condition()
        self._sync_of: dict[int, int] = {}
        self.submitted = -1
        """The newest sync that was submitted; -1 before the first."""
        self._published = -1
        self._current = -1
        self._serving: tuple[int, bool] = (0, False)
        """The current version, as far as it is this trainer's, and whether it is served."""
        self._snapshot: LineSnapshot | None = None
        self._unserved_since: float | None = None
        """When the newest published version began to wait for a replica."""

    def published_versions(self) -> tuple[int, ...]:
        """The newest version that this trainer has published; empty before the first."""
        with self._changed:
            return (max(self._sync_of),) if self._sync_of else ()

    def note_submitted(self, sync: int) -> None:
        """Note that a sync was submitted for publication."""
        with self._changed:
            self.submitted = sync

    def note_published(self, sync: int, version: int) -> None:
        """Note that a sync has become a version."""
        with self._changed:
            self._sync_of[version] = sync
            self._published = sync
            self._update_unserved()

    def update(self, snapshot: LineSnapshot) -> None:
        """Take over what the ledger says now."""
        current = snapshot.current or 0
        with self._changed:
            self._snapshot = snapshot
            sync = self._sync_of.get(current)
            if sync is None:
                return
            before, self._serving = self._serving, (current, bool(snapshot.acked_by(current)))
            if self._serving[1] and sync > self._current:
                self._current = sync
                self._unserved_since = None
            self._update_unserved()
            if self._serving != before:
                self._on_current(*self._serving)

    def check(self) -> None:
        """Whether training may go on with the rollouts it gets.

        Raises:
            TrainingStopped: for longer than `timeout_s` nothing is served, or only versions older
                than `max_staleness`.
        """
        with self._changed:
            since = self._unserved_since
            if since is None or time.monotonic() - since <= self._timeout_s:
                return
            current, served = self._serving
            if not served or max(self._sync_of) - current > self._max_staleness:
                raise self._nothing_ready()

    def wait_served(self, sync: int) -> None:
        """Wait until the version of this sync, or a later one, is current and served.

        Raises:
            TrainingStopped: it was not within `timeout_s`.
            Exception: what ended publishing.
        """
        self._wait(lambda: self._current >= sync and self._serving[1])

    def wait_room(self) -> None:
        """Wait until one more sync leaves current at most `max_staleness` syncs behind.

        Raises:
            TrainingStopped: there was no progress within `timeout_s`.
            Exception: what ended publishing.
        """
        most = max(self._max_staleness, 1)  # with 0, one sync at a time is the best possible
        self._wait(lambda: self.submitted + 1 - self._current <= most)

    def _update_unserved(self) -> None:
        if self._published <= self._current and self._serving[1]:
            self._unserved_since = None
        elif self._unserved_since is None and self._published >= 0:
            self._unserved_since = time.monotonic()
        self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            reached, since = (self._published, self._current), time.monotonic()
            while not condition():
                failure = self._failure()
                if failure is not None:
                    raise failure
                if (self._published, self._current) != reached:
                    reached, since = (self._published, self._current), time.monotonic()
                if time.monotonic() - since > self._timeout_s:
                    raise self._no_progress()
                self._changed.wait(min(_CHECK_S, self._timeout_s))

    def _no_progress(self) -> TrainingStopped:
        cause = self._blocked()
        if cause is None:
            return self._nothing_ready()
        waiting = self.submitted - self._published
        return PublishingBlocked(
            f"{waiting} syncs could not be published for {self._timeout_s:g} s: {cause}",
            hint="bring it back and resume from the last checkpoint; nothing committed is lost",
        )

    def _nothing_ready(self) -> NothingReady:
        version = max(self._sync_of, default=None)
        if version is None or self._snapshot is None:
            return NothingReady(
                f"nothing was published on line {self._line!r} for {self._timeout_s:g} s",
                hint="see whether ledger and storage answer: policyline doctor",
            )
        reasons = why_not_ready(self._snapshot, version, self._foreign(version))
        return NothingReady(
            f"{policy_name(self._line, version)} has not become ready within "
            f"{self._timeout_s:g} s: {reasons}",
            hint="run: policyline ledger status",
        )


def why_not_ready(snapshot: LineSnapshot, version: int, foreign: Mapping[str, str]) -> str:
    """For each replica, why it does not serve a version. Pure."""
    if not snapshot.replicas:
        return "no replica has joined the line (start `policyline sidecar` next to each server)"
    return "; ".join(
        f"{name}: {_reason(replica, snapshot.residency.get((name, version)), foreign.get(name))}"
        for name, replica in sorted(snapshot.replicas.items())
    )


def _reason(replica: ReplicaRow, reported: ResidencyRow | None, foreign: str | None) -> str:
    if replica.state != "joined":
        return f"{replica.state}" + (f" ({replica.reason})" if replica.reason else "")
    if replica.incarnation is None:
        return "its vLLM server does not answer"
    if is_acked(replica, reported):
        return "serves it"
    if reported is None or (foreign is not None and reported.state != "rejected"):
        return foreign or "has not fetched it"
    if reported.state == "acked":
        return "served it before its vLLM server was restarted"
    failures = f" after {reported.failures} failures" if reported.failures else ""
    return f"{reported.state}{failures}" + (f" ({reported.reason})" if reported.reason else "")
