"""The operator's verbs, and time passing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policyline.ledger import events as kinds
from policyline.ledger.append.appending import Appending, appends
from policyline.ledger.append.transitions import follow
from policyline.ledger.append.unit_of_work import UnitOfWork
from policyline.ledger.canonical import storable
from policyline.ledger.errors import (
    NotFound,
    Refused,
)
from policyline.ledger.events import Event
from policyline.ledger.names import policy_name
from policyline.ledger.readiness import Elapsed
from policyline.ledger.rollouts import HASHED_FIELDS, NewRollout, rollouts_hash
from policyline.ledger.rows import LineRow, ReplicaRow, VersionRow


class Operating(Appending):
    """Verbs of operators and observers of a line."""

    @appends
    def settle(self, unit: UnitOfWork, line: str, candidate: int, elapsed: Elapsed) -> bool:
        """Let time pass for the candidate, as seen on the observer's own clock.

        Returns:
            Whether something followed; False when the candidate is another one by now.
        """
        row = unit.get(LineRow, (line,))
        if row is None or row.candidate != candidate:
            return False
        return bool(follow(unit, line, self._actor, elapsed))

    def pin(self, line: str, version: int, *, serve: bool) -> None:
        """Preserve a version's files, or with `serve` serve it too, independent of the window.

        Raises:
            NotFound: not published.
        """
        self._mark(line, version, kinds.VERSION_PINNED, {"serve": serve})

    def unpin(self, line: str, version: int) -> None:
        """Undo `pin`.

        Raises:
            NotFound: not published.
        """
        self._mark(line, version, kinds.VERSION_UNPINNED, {})

    def pause(self, line: str, reason: str) -> bool:
        """Ask every watcher of the line to pause its engine, until `resume`.

        Returns:
            Whether this changed something; False when it was paused already.
        """
        return self._set_paused(line, kinds.FLEET_PAUSED, paused=True, payload={"reason": reason})

    def resume(self, line: str) -> bool:
        """Undo `pause`. Returns whether this changed something."""
        return self._set_paused(line, kinds.FLEET_RESUMED, paused=False, payload={})

    @appends
    def _set_paused(
        self, unit: UnitOfWork, line: str, kind: str, *, paused: bool, payload: Mapping[str, Any]
    ) -> bool:
        row = unit.get(LineRow, (line,))
        if row is None:
            raise NotFound(f"line {line!r} is not in this ledger", hint="open a run on it")
        if row.paused == paused:
            return False
        self._append(unit, kind, line=line, run=row.open_run or "", payload=payload)
        return True

    @appends
    def roll_back(self, unit: UnitOfWork, line: str, version: int, reason: str) -> tuple[int, ...]:
        """Make an earlier version current again and fence the run's publisher.

        Later versions are withdrawn for ever; the version stays current until a new epoch
        publishes. Readiness is not asked: a version that was current once was ready.

        Returns:
            The versions that are withdrawn by it.

        Raises:
            NotFound: not published.
            Refused: it was never current, was withdrawn, is of another run than the open one, or
                is current already.
        """
        name = policy_name(line, version)
        row = unit.get(VersionRow, (line, version))
        present = unit.get(LineRow, (line,))
        if row is None or row.digest is None or present is None:
            raise NotFound(f"{name} is not published in this ledger")
        if row.state != "published" or row.became_current_seq is None:
            what = row.state if row.state != "published" else "published but never current"
            raise Refused(f"{name} is {what}", hint="choose a version that was current")
        if row.run != present.open_run:
            raise Refused(
                f"{name} is of run {row.run!r}, open is {present.open_run!r}",
                hint=f"open a run with --parent-run {row.run} --parent-version {version}",
            )
        if present.current == version and present.candidate is None:
            raise Refused(f"{name} is current already")
        later = tuple(unit.versions_after(line, version))
        self._append(
            unit,
            kinds.CURRENT_ROLLED_BACK,
            line=line,
            run=row.run,
            version=version,
            epoch=present.epoch + 1,
            payload={"withdrawn": list(later), "reason": reason[:500]},
        )
        return later

    @appends
    def record_rollouts(
        self, unit: UnitOfWork, line: str, batch: str, rollouts: Sequence[NewRollout]
    ) -> Event | None:
        """Append a batch of rollouts and the event with its hash. Idempotent by `batch`.

        Args:
            unit: given by `appends`; callers leave it out.
            line: of all of them.
            batch: identifies the batch; sending it again changes nothing.
            rollouts: each request once, in the order answered.

        Returns:
            The batch's event; None for an empty batch.

        Raises:
            Conflict: the batch exists with other rollouts.
        """
        if not rollouts:
            return None
        rollouts = [_storable(rollout) for rollout in rollouts]
        payload = {
            "batch": batch,
            "count": len(rollouts),
            "versions": sorted({r.version for r in rollouts}),
            "sha256": rollouts_hash(rollouts),
        }
        key = f"rollouts/{line}/{batch}"
        event = self._append(unit, kinds.ROLLOUTS_RECORDED, line=line, key=key, payload=payload)
        if event in unit.appended:
            row = unit.get(LineRow, (line,))
            current = row.current if row else None
            unit.add_rollouts(line, batch, rollouts, current)
        return event

    @appends
    def _mark(
        self, unit: UnitOfWork, line: str, version: int, kind: str, payload: Mapping[str, Any]
    ) -> None:
        row = unit.get(VersionRow, (line, version))
        if row is None or row.digest is None:
            raise NotFound(f"{policy_name(line, version)} is not published in this ledger")
        self._append(unit, kind, line=line, run=row.run, version=version, payload=payload)

    @appends
    def withdraw(self, unit: UnitOfWork, line: str, version: int, reason: str) -> None:
        """Take a published version out of service for ever. Idempotent.

        Raises:
            NotFound: not published.
            Refused: it is current; roll back instead.
        """
        row = unit.get(VersionRow, (line, version))
        if row is None or row.state == "reserved":
            raise NotFound(f"{policy_name(line, version)} is not published in this ledger")
        present = unit.get(LineRow, (line,))
        if present is not None and present.current == version:
            raise Refused(
                f"{policy_name(line, version)} is current",
                hint="run: policyline ledger rollback --to an earlier version",
            )
        if row.state in {"published", "skipped"}:
            self._append(
                unit,
                kinds.VERSION_WITHDRAWN,
                line=line,
                run=row.run,
                version=version,
                payload={"reason": reason[:500]},
            )

    @appends
    def retry(
        self, unit: UnitOfWork, line: str, version: int, *, replica: str | None = None
    ) -> tuple[str, ...]:
        """Let a version that was rejected or quarantined be tried again where it was.

        Args:
            unit: given by `appends`; callers leave it out.
            line: of the version.
            version: its number.
            replica: only there; None for every replica that rejects it.

        Returns:
            The replicas that will try again, by name; those that do not reject it are left alone.

        Raises:
            NotFound: not published, or no such replica.
            Refused: it is withdrawn.
        """
        name = policy_name(line, version)
        row = unit.get(VersionRow, (line, version))
        if row is None or row.digest is None:
            raise NotFound(f"{name} is not published in this ledger")
        if replica is not None and unit.get(ReplicaRow, (line, replica)) is None:
            raise NotFound(
                f"replica {replica!r} is not in this ledger", hint="run: policyline ledger status"
            )
        if row.state == "withdrawn":
            raise Refused(
                f"{name} is withdrawn ({row.reason})",
                hint="publish the adapter again, as a new version",
            )
        rejecting = tuple(
            sorted(
                row.replica
                for row in unit.residency(line, version).values()
                if row.state == "rejected" and replica in {None, row.replica}
            )
        )
        for one in rejecting:
            self._append(
                unit, kinds.VERSION_RETRIED, line=line, version=version, replica=one, payload={}
            )
        return rejecting


def _storable(rollout: NewRollout) -> NewRollout:
    """The rollout itself, nearly always: only a client's texts may be impossible to store."""
    values = [getattr(rollout, name) for name in HASHED_FIELDS]
    mended = storable(values)
    return rollout if mended == values else NewRollout(*mended)
