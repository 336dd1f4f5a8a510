"""The ledger's writing side: every verb that appends, each in one serialised transaction.

A verb takes the lock, checks what it must (epoch, generation, names), appends its event, folds it
into the projections, then appends whatever follows from it (readiness), and commits. Readers are in
`ledger.reads`. SQL lives in these two modules and `ledger.sqltables` only.
"""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ledger import events as kinds
from ledger import migrate, schema, statements
from ledger.consequences import READINESS_KINDS, follow
from ledger.errors import (
    Conflict,
    LedgerUnavailable,
    NotFound,
    Refused,
    StaleEpoch,
    StaleGeneration,
)
from ledger.events import Event, NewEvent
from ledger.manifest import Anchor, Manifest
from ledger.names import DEFAULT_LINE, check_label, check_line, policy_name
from ledger.readiness import NOTHING_ELAPSED, Elapsed
from ledger.reads import Reads, replica_row
from ledger.rows import LineRow, ReplicaRow, RunRow, VersionRow
from ledger.settings import RunSettings
from ledger.signals import Signal, signal_for
from ledger.sqltables import Journal
from ledger.transaction import begin


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to publish to a run, until somebody claims a newer epoch."""

    line: str
    run: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """A version number given to one attempt."""

    line: str
    run: str
    version: int
    epoch: int
    attempt: str
    anchor: Anchor

    @property
    def name(self) -> str:
        """The policy name."""
        return policy_name(self.line, self.version)


@dataclass(frozen=True, slots=True)
class Membership:
    """The right to speak for a replica, until a newer watcher joins."""

    line: str
    replica: str
    generation: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a watcher says of its engine when it joins or meets a new incarnation."""

    incarnation: str | None
    build: str = ""
    max_loras: int | None = None


class Ledger(Reads):
    """A version ledger in SQLite or Postgres. Synchronous and thread-safe; daemons use threads.

    Args:
        url: `sqlite:///file.db`, a plain path, or `postgresql://user@host/name`.
        actor: who appends, as shown to auditors; default user@host:pid.
        clock: gives the time to record, UTC; it is never allowed to go back.

    Raises:
        LedgerUnavailable: the database cannot be reached.
        SchemaMismatch: it has another schema; run `policyline ledger upgrade`.
    """

    def __init__(
        self,
        url: str,
        *,
        actor: str | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        parsed = schema.ledger_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        """Whether the database is a SQLite file; otherwise it is Postgres."""
        super().__init__(schema.connect(parsed), parsed.render_as_string(hide_password=True))
        self._writer = schema.connect_writer(parsed)
        self._actor = actor or default_actor()
        self._clock = clock
        self._signal = signal_for(self._engine)
        if self.is_sqlite and not Path(parsed.database or "").exists():
            raise LedgerUnavailable(
                f"ledger {self.shown_url} does not exist",
                hint=f"run: policyline ledger upgrade --ledger {self.shown_url}",
            )
        try:
            with self._reading() as connection:
                migrate.check(connection, self.shown_url)
                self._ledger_id = self._head(connection)[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._engine.dispose()
        self._writer.dispose()

    @property
    def actor(self) -> str:
        """Who this ledger object appends as."""
        return self._actor

    @property
    def ledger_id(self) -> str:
        """The ledger's identity (32 hex digits); a restored copy keeps it, a new one differs."""
        return self._ledger_id

    @property
    def signal(self) -> Signal:
        """What wakes readers after a commit."""
        return self._signal

    # --- runs and epochs

    def open_run(
        self,
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
        with self._writing() as journal:
            present = journal.get(RunRow, (run,))
            if present is not None:
                return self._claim(journal, present, line, take_over=take_over)
            if parent_run is not None and journal.get(RunRow, (parent_run,)) is None:
                raise NotFound(f"parent run {parent_run!r} is not in this ledger")
            row = journal.get(LineRow, (line,)) or LineRow(line=line)
            former = journal.get(RunRow, (row.open_run,)) if row.open_run else None
            if former is not None:
                _refuse_live_holder(former, take_over=take_over)
            rules = settings or RunSettings()
            epoch = row.epoch + 1
            self._append(
                journal,
                kinds.RUN_OPENED,
                line=line,
                run=run,
                epoch=epoch,
                payload={
                    "closes": row.open_run,
                    "holder": self._actor,
                    "max_staleness": rules.max_staleness,
                    "min_ready": rules.min_ready,
                    "ready_grace_s": rules.ready_grace_s,
                    "candidate_timeout_s": rules.candidate_timeout_s,
                    "parent_run": parent_run,
                    "parent_version": parent_version,
                    "lineage": dict(lineage or {}),
                },
            )
            return Claim(line, run, epoch)

    def _claim(self, journal: Journal, row: RunRow, line: str, *, take_over: bool) -> Claim:
        if row.line != line:
            raise Refused(
                f"run {row.run!r} belongs to line {row.line!r}, not {line!r}",
                hint="name its line, or choose another run name",
            )
        if row.state == "closed":
            raise Refused(f"run {row.run!r} is closed", hint="open a new run, with it as parent")
        _refuse_live_holder(row, take_over=take_over)
        present = journal.get(LineRow, (row.line,)) or LineRow(line=row.line)
        epoch = present.epoch + 1
        self._append(
            journal,
            kinds.EPOCH_CLAIMED,
            line=row.line,
            run=row.run,
            epoch=epoch,
            payload={"holder": self._actor, "former": row.holder},
        )
        return Claim(row.line, row.run, epoch)

    def release(self, claim: Claim) -> None:
        """Give the epoch back, so that the next publisher needs no take-over. Idempotent."""
        with self._writing() as journal:
            row = journal.get(RunRow, (claim.run,))
            if row is not None and row.epoch == claim.epoch and row.holder is not None:
                self._append(
                    journal,
                    kinds.EPOCH_RELEASED,
                    line=claim.line,
                    run=claim.run,
                    epoch=claim.epoch,
                    payload={"holder": row.holder},
                )

    def close_run(self, run: str, *, take_over: bool = False) -> None:
        """Close a run; what it serves goes on being served. Idempotent.

        Raises:
            NotFound: unknown run.
            Refused: a live publisher holds it and `take_over` is false.
        """
        with self._writing() as journal:
            row = journal.get(RunRow, (run,))
            if row is None:
                raise NotFound(f"run {run!r} is not in this ledger", hint="see: ledger runs")
            if row.state == "open":
                _refuse_live_holder(row, take_over=take_over)
                self._append(journal, kinds.RUN_CLOSED, line=row.line, run=run, payload={})

    # --- publishing

    def reserve(
        self, claim: Claim, *, attempt: str | None = None, version: int | None = None
    ) -> Reservation:
        """Reserve a version number under the epoch, before a byte is written (I6).

        Args:
            claim: from `open_run`.
            attempt: identifies the attempt; asking again for the same one gives the same number.
            version: a number of the caller's choice; default is the line's next.

        Raises:
            StaleEpoch: somebody else may publish now.
            Conflict: the number is taken.
        """
        attempt = check_label("attempt", attempt or uuid.uuid4().hex[:16])
        key = f"reserve/{claim.line}/{claim.epoch}/{attempt}"
        with self._writing() as journal:
            self._check_epoch(journal, claim)
            earlier = journal.find(key)
            if earlier is not None:
                event = earlier
                if version not in {None, event.version}:
                    raise Conflict(f"attempt {attempt} reserved version {event.version} before")
            else:
                row = journal.get(LineRow, (claim.line,)) or LineRow(line=claim.line)
                number = row.next_version if version is None else version
                self._check_free(journal, claim.line, number)
                event = self._append(
                    journal,
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

    def _check_free(self, journal: Journal, line: str, version: int) -> None:
        if version < 1:
            raise Refused(f"version {version} is not a positive number")
        taken = journal.get(VersionRow, (line, version))
        if taken is not None:
            digest = f" with digest {taken.digest[:16]}" if taken.digest else ""
            raise Conflict(
                f"{policy_name(line, version)} is taken: {taken.state}{digest} in run "
                f"{taken.run!r}",
                hint="leave the number out to get the next one",
            )

    def publish(
        self, claim: Claim, manifest: Manifest, *, phases: Mapping[str, float] | None = None
    ) -> Event:
        """Append `version_published`: the commit point of a version (I5). Idempotent.

        Args:
            claim: from `open_run`; its epoch is newer than the manifest's when a publisher that
                died is finished by its successor.
            manifest: of the reserved version, whose bytes are durable on storage already.
            phases: seconds per publisher phase (save, check, digest, commit, ...).

        Raises:
            StaleEpoch: somebody else may publish now; nothing was appended.
            Conflict: published before with another digest.
            Refused: the number was not reserved by this attempt.
        """
        with self._writing() as journal:
            key = f"publish/{manifest.line}/{manifest.version}"
            payload = {
                "digest": manifest.digest,
                "size_bytes": manifest.size_bytes,
                "manifest": manifest.to_text(),
            }
            if journal.find(key) is None:
                self._check_epoch(journal, claim)
                row = journal.get(VersionRow, (manifest.line, manifest.version))
                wanted = ("reserved", claim.run, manifest.attempt)
                if row is None or (row.state, row.run, row.attempt) != wanted:
                    raise Refused(f"{manifest.name} is not reserved by attempt {manifest.attempt}")
            event = self._append(
                journal,
                kinds.VERSION_PUBLISHED,
                line=manifest.line,
                run=claim.run,
                version=manifest.version,
                epoch=claim.epoch,
                key=key,
                payload=payload,
            )
            journal.add_phases(event, "publisher", phases or {})
            return event

    def reject(self, claim: Claim, version: int, reason: str) -> None:
        """Record that a reserved number will not be published; it stays a hole. Idempotent."""
        with self._writing() as journal:
            self._check_epoch(journal, claim)
            row = journal.get(VersionRow, (claim.line, version))
            if row is not None and row.state == "reserved":
                self._append(
                    journal,
                    kinds.VERSION_REJECTED,
                    line=claim.line,
                    run=claim.run,
                    version=version,
                    epoch=claim.epoch,
                    payload={"reason": reason[:500]},
                )

    def withdraw(self, line: str, version: int, reason: str) -> None:
        """Take a published version out of service for ever. Idempotent.

        Raises:
            NotFound: not published.
            Refused: it is current; roll back instead.
        """
        with self._writing() as journal:
            row = journal.get(VersionRow, (line, version))
            if row is None or row.state == "reserved":
                raise NotFound(f"{policy_name(line, version)} is not published in this ledger")
            present = journal.get(LineRow, (line,))
            if present is not None and present.current == version:
                raise Refused(
                    f"{policy_name(line, version)} is current",
                    hint="run: policyline ledger rollback --to an earlier version",
                )
            if row.state in {"published", "skipped"}:
                self._append(
                    journal,
                    kinds.VERSION_WITHDRAWN,
                    line=line,
                    run=row.run,
                    version=version,
                    payload={"reason": reason[:500]},
                )

    # --- replicas

    def join(self, line: str, replica: str, facts: EngineFacts, *, url: str = "") -> Membership:
        """Join as the watcher of `replica`; a former watcher of that name is fenced."""
        check_line(line)
        check_label("replica", replica)
        with self._writing() as journal:
            row = journal.get(ReplicaRow, (line, replica))
            generation = 1 if row is None else row.generation + 1
            self._append(
                journal,
                kinds.REPLICA_JOINED,
                line=line,
                replica=replica,
                generation=generation,
                payload={
                    "incarnation": facts.incarnation,
                    "build": facts.build,
                    "max_loras": facts.max_loras,
                    "url": url,
                },
            )
            journal.set_heartbeat(line, replica, generation, 0)
            return Membership(line, replica, generation)

    def leave(self, member: Membership, reason: str) -> None:
        """Leave the fleet: nobody waits for this replica any more. Idempotent."""
        with self._writing() as journal:
            row = journal.get(ReplicaRow, (member.line, member.replica))
            if row is None or row.generation != member.generation or row.state == "left":
                return
            self._of_replica(journal, kinds.REPLICA_LEFT, member, {"reason": reason})

    def declare_lost(
        self, line: str, replica: str, *, generation: int, counter: int, reason: str
    ) -> bool:
        """Declare a silent replica lost, unless its heartbeat has moved from `counter` since.

        Returns:
            Whether it is now lost by this call.
        """
        with self._writing() as journal:
            row = journal.get(ReplicaRow, (line, replica))
            if row is None or row.state != "joined" or row.generation != generation:
                return False
            if journal.heartbeat(line, replica) != (generation, counter):
                return False
            self._append(
                journal,
                kinds.REPLICA_LOST,
                line=line,
                replica=replica,
                generation=generation,
                payload={"counter": counter, "reason": reason},
            )
            return True

    def change_incarnation(self, member: Membership, facts: EngineFacts) -> None:
        """Say that the engine is another process now (or, with None, that none is known).

        Every ack of another incarnation is void from here on (I4). A no-op when nothing changed.
        """
        with self._writing() as journal:
            row = self._check_generation(journal, member)
            if row.incarnation != facts.incarnation:
                self._of_replica(
                    journal,
                    kinds.INCARNATION_CHANGED,
                    member,
                    {
                        "incarnation": facts.incarnation,
                        "build": facts.build,
                        "max_loras": facts.max_loras,
                    },
                )

    def fetched(self, member: Membership, version: int, digest: str) -> None:
        """Say that the bytes are verified on this replica's own disk."""
        with self._writing() as journal:
            self._check_generation(journal, member)
            self._of_replica(
                journal, kinds.VERSION_FETCHED, member, {"digest": digest}, version=version
            )

    def ack(
        self,
        member: Membership,
        version: int,
        *,
        digest: str,
        incarnation: str,
        build: str,
        probe: Sequence[float],
        phases: Mapping[str, float] | None = None,
    ) -> Event:
        """Say, checked, that an incarnation serves a version (I4).

        Args:
            member: from `join`.
            version: its number.
            digest: of the bytes that were loaded; must be the published one.
            incarnation: read before and after; must be the replica's present one.
            build: of the engine, to know which probes are comparable.
            probe: log-probabilities (natural log) of the probe's tokens.
            phases: seconds per watcher phase (notice, fetch, verify, load, probe).

        Raises:
            StaleGeneration: a newer watcher speaks for this replica.
            Refused: another digest than the published one, or an incarnation that is gone.
        """
        with self._writing() as journal:
            row = self._check_generation(journal, member)
            published = journal.get(VersionRow, (member.line, version))
            name = policy_name(member.line, version)
            if published is None or published.digest != digest:
                raise Refused(f"{name} is not published with digest {digest[:16]}")
            if row.incarnation != incarnation:
                raise Refused(
                    f"{name} was loaded into incarnation {incarnation}, the present one is "
                    f"{row.incarnation}"
                )
            event = self._of_replica(
                journal,
                kinds.VERSION_ACKED,
                member,
                {
                    "digest": digest,
                    "incarnation": incarnation,
                    "build": build,
                    "probe": repr_floats(probe),
                },
                version=version,
            )
            journal.add_phases(event, member.replica, phases or {}, run=published.run)
            return event

    def load_failed(
        self, member: Membership, version: int, *, digest: str, reason: str, permanent: bool
    ) -> None:
        """Say that a version could not be served; `permanent` rejects it on this replica."""
        with self._writing() as journal:
            self._check_generation(journal, member)
            self._of_replica(
                journal,
                kinds.VERSION_LOAD_FAILED,
                member,
                {"digest": digest, "reason": reason[:500], "permanent": permanent},
                version=version,
            )

    def evicted(self, member: Membership, version: int, *, digest: str, reason: str) -> None:
        """Say that the engine no longer serves a version."""
        with self._writing() as journal:
            self._check_generation(journal, member)
            self._of_replica(
                journal,
                kinds.VERSION_EVICTED,
                member,
                {"digest": digest, "reason": reason},
                version=version,
            )

    def foreign_adapter_seen(self, member: Membership, name: str, path: str, why: str) -> None:
        """Report an adapter on the engine that this ledger did not load. Once per sight."""
        with self._writing() as journal:
            self._check_generation(journal, member)
            self._of_replica(
                journal,
                kinds.FOREIGN_ADAPTER_SEEN,
                member,
                {"name": name[:256], "path": path[:512], "why": why},
            )

    def probe_mismatch(
        self, member: Membership, version: int, *, digest: str, reference: str, difference: float
    ) -> None:
        """Report that a probe disagrees with the one that replica `reference` recorded."""
        with self._writing() as journal:
            self._check_generation(journal, member)
            self._of_replica(
                journal,
                kinds.PROBE_MISMATCH,
                member,
                {"digest": digest, "reference": reference, "difference": repr(difference)},
                version=version,
            )

    def beat(self, member: Membership, counter: int) -> None:
        """Move the heartbeat. Signals nobody, is no event, and takes no lock on Postgres.

        Raises:
            StaleGeneration: a newer watcher speaks for this replica, or it was declared lost.
        """
        values = {
            "of_line": member.line,
            "of_replica": member.replica,
            "with_generation": member.generation,
            "to_counter": counter,
        }
        with self._translating(), self._engine.connect() as plain:
            connection = plain.execution_options(write=True)
            text, parameters = statements.BEAT.render(self._engine.dialect, values)
            parameters = parameters if isinstance(parameters, dict) else tuple(parameters)
            if connection.exec_driver_sql(text, parameters).rowcount != 1:
                raise _stale(member, replica_row(connection, member.line, member.replica))
            connection.commit()

    # --- operators

    def settle(self, line: str, candidate: int, elapsed: Elapsed) -> bool:
        """Let time pass for the candidate, as seen on the observer's own clock.

        Returns:
            Whether something followed; False when the candidate is another one by now.
        """
        with self._writing() as journal:
            row = journal.get(LineRow, (line,))
            if row is None or row.candidate != candidate:
                return False
            return bool(follow(journal, line, self._actor, elapsed))

    def pin(self, line: str, version: int, *, serve: bool) -> None:
        """Keep a version's files, or with `serve` keep it served too, whatever the window says.

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

    def _mark(self, line: str, version: int, kind: str, payload: Mapping[str, Any]) -> None:
        with self._writing() as journal:
            row = journal.get(VersionRow, (line, version))
            if row is None or row.digest is None:
                raise NotFound(f"{policy_name(line, version)} is not published in this ledger")
            self._append(journal, kind, line=line, run=row.run, version=version, payload=payload)

    # --- inside a transaction

    @contextmanager
    def _writing(self) -> Iterator[Journal]:
        """One serialised transaction; readers are woken after its commit."""
        with self._translating():
            with begin(self._writer) as transaction:
                journal = Journal(transaction, self._engine.dialect, self._now())
                yield journal
                if journal.appended:
                    journal.commit()
            if journal.appended:
                self._signal.after_commit()

    def _now(self) -> str:
        return self._clock().astimezone(UTC).isoformat(timespec="microseconds")

    def _append(
        self,
        journal: Journal,
        kind: str,
        *,
        line: str,
        payload: Mapping[str, Any],
        run: str = "",
        version: int | None = None,
        replica: str | None = None,
        epoch: int | None = None,
        generation: int | None = None,
        key: str | None = None,
    ) -> Event:
        if replica is not None and not run:
            row = journal.get(LineRow, (line,))
            run = (row.open_run if row else None) or ""
        event = journal.append(
            NewEvent(
                kind=kind,
                line=line,
                run=run,
                key=key or uuid.uuid4().hex,
                actor=self._actor,
                payload=payload,
                version=version,
                replica=replica,
                epoch=epoch,
                generation=generation,
            ),
            may_exist=key is not None,
        )
        if kind in READINESS_KINDS:
            follow(journal, line, self._actor, NOTHING_ELAPSED)
        return event

    def _of_replica(
        self,
        journal: Journal,
        kind: str,
        member: Membership,
        payload: Mapping[str, Any],
        *,
        version: int | None = None,
    ) -> Event:
        return self._append(
            journal,
            kind,
            line=member.line,
            version=version,
            replica=member.replica,
            generation=member.generation,
            payload=payload,
        )

    def _check_epoch(self, journal: Journal, claim: Claim) -> None:
        row = journal.get(RunRow, (claim.run,))
        if row is None:
            raise NotFound(f"run {claim.run!r} is not in this ledger")
        if row.state == "closed" or row.epoch != claim.epoch:
            line = journal.get(LineRow, (claim.line,))
            present = journal.get(RunRow, (line.open_run,)) if line and line.open_run else row
            holder = present.holder if present else None
            since = present.claimed_at if present else ""
            raise StaleEpoch(
                f"epoch {claim.epoch} of run {claim.run!r} is over: run "
                f"{present.run if present else claim.run!r} is held by {holder or 'nobody'} "
                f"since {since}",
                holder=holder,
                since=since,
                hint="stop this publisher; open the run again to go on",
            )

    def _check_generation(self, journal: Journal, member: Membership) -> ReplicaRow:
        row = journal.get(ReplicaRow, (member.line, member.replica))
        if row is None or row.generation != member.generation or row.state != "joined":
            raise _stale(member, row)
        return row


def _stale(member: Membership, row: ReplicaRow | None) -> StaleGeneration:
    now = "unknown" if row is None else f"{row.state} with generation {row.generation}"
    return StaleGeneration(
        f"replica {member.replica!r} is {now}, this watcher has {member.generation}",
        hint="join again; if two sidecars share a name, give each its own --replica",
    )


def default_actor() -> str:
    """user@host:pid of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


def repr_floats(values: Sequence[float]) -> str:
    """JSON list of floats that reads back exactly."""
    return "[" + ",".join(repr(float(v)) for v in values) + "]"


def _refuse_live_holder(row: RunRow, *, take_over: bool) -> None:
    """A run with a live publisher is not taken by accident.

    A holder of this host whose process is gone is not live; of another host nothing is known, so
    it counts as live.
    """
    if row.holder is None or take_over or _is_gone(row.holder):
        return
    raise Refused(
        f"run {row.run!r} is held by {row.holder} since {row.claimed_at}",
        hint="stop that publisher, or pass --take-over to fence it",
    )


def _is_gone(holder: str) -> bool:
    host, _, pid = holder.rpartition("@")[2].rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
