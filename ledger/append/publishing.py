"""The publisher's verbs: runs, epochs, reservations, publication."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from policyline.ledger import events as kinds
from policyline.ledger.actor import is_gone
from policyline.ledger.append.appending import Appending, appends
from policyline.ledger.append.unit_of_work import UnitOfWork
from policyline.ledger.claims import Claim, Reservation
from policyline.ledger.errors import (
    Conflict,
    NotFound,
    Refused,
    StaleEpoch,
)
from policyline.ledger.events import Event
from policyline.ledger.manifest import Anchor, Manifest
from policyline.ledger.names import DEFAULT_LINE, check_label, check_line, policy_name
from policyline.ledger.rows import LineRow, RunRow, VersionRow
from policyline.ledger.settings import RunSettings


class Publishing(Appending):
    """Verbs of a run's publisher."""

    @appends
    def open_run(
        self,
        unit: UnitOfWork,
        run: str,
        *,
        line: str = DEFAULT_LINE,
        settings: RunSettings | None = None,
        parent_run: str | None = None,
        parent_version: int | None = None,
        take_over: bool = False,
        lineage: Mapping[str, Any] | None = None,
    ) -> Claim:
        """Open `run`, or go on with it when it is open, and claim its epoch.

        Opening a run of a line closes the former. `settings` count only when the run is opened
        for the first time.

        Raises:
            Refused: the run is closed, belongs to another line, or a live publisher holds it
                and `take_over` is false.
            NotFound: the parent is unknown.
        """
        check_line(line)
        check_label("run", run)
        present = unit.get(RunRow, (run,))
        if present is not None:
            return self._claim(unit, present, line, take_over=take_over)
        _check_parent(unit, parent_run, parent_version)
        row = unit.get(LineRow, (line,)) or LineRow(line=line)
        former = unit.get(RunRow, (row.open_run,)) if row.open_run else None
        if former is not None:
            _refuse_live_holder(former, take_over=take_over)
        epoch = row.epoch + 1
        self._append(
            unit,
            kinds.RUN_OPENED,
            line=line,
            run=run,
            epoch=epoch,
            payload={
                "closes": row.open_run,
                "holder": self._actor,
                **asdict(settings or RunSettings()),
                "parent_run": parent_run,
                "parent_version": parent_version,
                "lineage": dict(lineage or {}),
            },
        )
        return Claim(line, run, epoch)

    def _claim(self, unit: UnitOfWork, row: RunRow, line: str, *, take_over: bool) -> Claim:
        if row.line != line:
            raise Refused(
                f"run {row.run!r} belongs to line {row.line!r}, not {line!r}",
                hint="name its line, or choose another run name",
            )
        if row.state == "closed":
            raise Refused(f"run {row.run!r} is closed", hint="open a new run, with it as parent")
        _refuse_live_holder(row, take_over=take_over)
        present = unit.get(LineRow, (row.line,)) or LineRow(line=row.line)
        epoch = present.epoch + 1
        self._append(
            unit,
            kinds.EPOCH_CLAIMED,
            line=row.line,
            run=row.run,
            epoch=epoch,
            payload={"holder": self._actor, "former": row.holder},
        )
        return Claim(row.line, row.run, epoch)

    @appends
    def release(self, unit: UnitOfWork, claim: Claim) -> None:
        """Give the epoch back, so that the next publisher needs no take-over. Idempotent."""
        row = unit.get(RunRow, (claim.run,))
        if row is not None and row.epoch == claim.epoch and row.holder is not None:
            self._append(
                unit,
                kinds.EPOCH_RELEASED,
                line=claim.line,
                run=claim.run,
                epoch=claim.epoch,
                payload={"holder": row.holder},
            )

    @appends
    def close_run(self, unit: UnitOfWork, run: str, *, take_over: bool = False) -> None:
        """Close a run; what it serves goes on being served. Idempotent.

        Raises:
            NotFound: unknown run.
            Refused: a live publisher holds it and `take_over` is false.
        """
        row = unit.get(RunRow, (run,))
        if row is None:
            raise NotFound(f"run {run!r} is not in this ledger", hint="see: ledger runs")
        if row.state == "open":
            _refuse_live_holder(row, take_over=take_over)
            self._append(unit, kinds.RUN_CLOSED, line=row.line, run=run, payload={})

    @appends
    def reserve(
        self,
        unit: UnitOfWork,
        claim: Claim,
        *,
        attempt: str | None = None,
        version: int | None = None,
    ) -> Reservation:
        """Reserve a version number under the epoch, before a byte is written (I6).

        Args:
            unit: given by `appends`; callers leave it out.
            claim: from `open_run`.
            attempt: identifies the attempt; asking again for the same one gives the same number.
            version: a number of the caller's choice; default is the line's next.

        Raises:
            StaleEpoch: another process may publish now.
            Conflict: the number is taken.
            Refused: it is less than one that was reserved before.
        """
        attempt = check_label("attempt", attempt or uuid.uuid4().hex[:16])
        key = f"reserve/{claim.line}/{claim.epoch}/{attempt}"
        unit.prefetch((RunRow, (claim.run,)), (LineRow, (claim.line,)))
        self._check_epoch(unit, claim)
        earlier = unit.find(key)
        if earlier is not None:
            event = earlier
            if version not in {None, event.version}:
                raise Conflict(f"attempt {attempt} reserved version {event.version} before")
        else:
            row = unit.get(LineRow, (claim.line,)) or LineRow(line=claim.line)
            number = row.next_version if version is None else version
            self._check_free(unit, claim.line, number)
            event = self._append(
                unit,
                kinds.VERSION_RESERVED,
                line=claim.line,
                run=claim.run,
                version=number,
                epoch=claim.epoch,
                key=key,
                payload={"attempt": attempt},
            )
        return Reservation(
            line=claim.line,
            run=claim.run,
            version=event.version or 0,
            epoch=claim.epoch,
            attempt=attempt,
            anchor=Anchor(self._ledger_id, event.seq, event.hash),
        )

    def _check_free(self, unit: UnitOfWork, line: str, version: int) -> None:
        if version < 1:
            raise Refused(f"version {version} is not a positive number")
        taken = unit.get(VersionRow, (line, version))
        if taken is not None:
            digest = f" with digest {taken.digest[:16]}" if taken.digest else ""
            raise Conflict(
                f"{policy_name(line, version)} is taken: {taken.state}{digest} in run "
                f"{taken.run!r}",
                hint="leave the number out to get the next one",
            )
        row = unit.get(LineRow, (line,))
        if row is not None and version < row.next_version:
            raise Refused(
                f"{policy_name(line, version)} is older than what was reserved since and could "
                "never become current",
                hint=f"leave the number out to get {row.next_version}, or name a greater one",
            )

    @appends
    def publish(
        self,
        unit: UnitOfWork,
        claim: Claim,
        manifest: Manifest,
        *,
        phases: Mapping[str, float] | None = None,
    ) -> Event:
        """Append `version_published`: the commit point of a version (I5). Idempotent.

        Args:
            unit: given by `appends`; callers leave it out.
            claim: from `open_run`; its epoch is newer than the manifest's when a publisher that
                died is finished by its successor.
            manifest: of the reserved version, whose bytes are durable on storage already.
            phases: seconds per publisher phase (save, check, digest, commit, ...).

        Raises:
            StaleEpoch: another process may publish now; nothing was appended.
            Conflict: published before with another digest.
            Refused: the number was not reserved by this attempt.
        """
        key = f"publish/{manifest.line}/{manifest.version}"
        payload = {
            "digest": manifest.digest,
            "size_bytes": manifest.size_bytes,
            "manifest": manifest.to_text(),
        }
        if unit.find(key) is None:
            self._check_epoch(unit, claim)
            row = unit.get(VersionRow, (manifest.line, manifest.version))
            wanted = ("reserved", claim.run, manifest.attempt)
            if row is None or (row.state, row.run, row.attempt) != wanted:
                raise Refused(f"{manifest.name} is not reserved by attempt {manifest.attempt}")
        event = self._append(
            unit,
            kinds.VERSION_PUBLISHED,
            line=manifest.line,
            run=claim.run,
            version=manifest.version,
            epoch=claim.epoch,
            key=key,
            payload=payload,
        )
        unit.add_phases(event, "publisher", phases or {})
        return event

    @appends
    def reject(self, unit: UnitOfWork, claim: Claim, version: int, reason: str) -> None:
        """Record that a reserved number will not be published; it stays a hole. Idempotent."""
        self._check_epoch(unit, claim)
        row = unit.get(VersionRow, (claim.line, version))
        if row is not None and row.state == "reserved":
            self._append(
                unit,
                kinds.VERSION_REJECTED,
                line=claim.line,
                run=claim.run,
                version=version,
                epoch=claim.epoch,
                payload={"reason": reason[:500]},
            )

    def _check_epoch(self, unit: UnitOfWork, claim: Claim) -> None:
        row = unit.get(RunRow, (claim.run,))
        if row is None:
            raise NotFound(f"run {claim.run!r} is not in this ledger")
        if row.state == "open" and row.epoch == claim.epoch:
            return
        line = unit.get(LineRow, (claim.line,))
        event = unit.epoch_event(claim.line, line.epoch if line else 0)
        if event is None or event.epoch == claim.epoch:
            raise StaleEpoch(
                f"run {claim.run!r} is closed", holder=None, since="", hint="open a new run"
            )
        if event.kind == kinds.CURRENT_ROLLED_BACK:
            name = policy_name(event.line, event.version or 0)
            raise StaleEpoch(
                f"epoch {claim.epoch} of run {claim.run!r} is over: {event.actor} rolled back to "
                f"{name} at {event.recorded_at} ({event.data['reason']})",
                holder=None,
                since=event.recorded_at,
                hint="restart the trainer from that version; opening the run claims a new epoch",
            )
        raise StaleEpoch(
            f"epoch {claim.epoch} of run {claim.run!r} is over: run {event.run!r} is held by "
            f"{event.data['holder']} since {event.recorded_at}",
            holder=event.data["holder"],
            since=event.recorded_at,
            hint="stop this publisher; open the run again to go on",
        )


def _check_parent(unit: UnitOfWork, run: str | None, version: int | None) -> None:
    """The run must be there, and the version must be one that it published."""
    if run is None:
        if version is not None:
            raise Refused(f"parent version {version} has no parent run", hint="name the run too")
        return
    row = unit.get(RunRow, (run,))
    if row is None:
        raise NotFound(f"parent run {run!r} is not in this ledger")
    if version is not None:
        published = unit.get(VersionRow, (row.line, version))
        if published is None or published.run != run or published.digest is None:
            name = policy_name(row.line, version)
            raise NotFound(f"parent run {run!r} has not published {name}")


def _refuse_live_holder(row: RunRow, *, take_over: bool) -> None:
    """A run with a live publisher is not taken by accident.

    A holder of this host whose process is gone is not live; of another host, or in another
    container, nothing is known, so it counts as live.
    """
    if row.holder is None or take_over or is_gone(row.holder):
        return
    raise Refused(
        f"run {row.run!r} is held by {row.holder} since {row.claimed_at}",
        hint="stop that publisher, or pass --take-over to fence it",
    )
