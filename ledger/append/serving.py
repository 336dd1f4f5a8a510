"""The watcher's verbs: joining, acks, failures, evictions, heartbeats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from policyline.ledger import events as kinds
from policyline.ledger.append.appending import Appending, appends
from policyline.ledger.append.unit_of_work import UnitOfWork
from policyline.ledger.canonical import storable
from policyline.ledger.claims import EngineFacts, Membership
from policyline.ledger.db import statements
from policyline.ledger.db.statements import ROW_BY_KEY, row_of
from policyline.ledger.errors import ProbeDisagrees, Refused, StaleGeneration
from policyline.ledger.events import Event
from policyline.ledger.names import check_label, check_line, policy_name
from policyline.ledger.probe import largest_difference
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, VersionRow


class Serving(Appending):
    """Verbs of a replica's watcher."""

    @appends
    def join(
        self, unit: UnitOfWork, line: str, replica: str, facts: EngineFacts, *, url: str = ""
    ) -> Membership:
        """Join as the watcher of `replica`; a former watcher of that name is fenced."""
        check_line(line)
        check_label("replica", replica)
        facts = _storable(facts)
        row = unit.get(ReplicaRow, (line, replica))
        generation = 1 if row is None else row.generation + 1
        self._append(
            unit,
            kinds.REPLICA_JOINED,
            line=line,
            replica=replica,
            generation=generation,
            payload={
                "incarnation": facts.incarnation,
                "build": facts.build,
                "max_loras": facts.max_loras,
                "url": url,
                "keeps": _acks_in_force(unit, line, replica, facts),
            },
        )
        unit.set_heartbeat(line, replica, generation, 0)
        return Membership(line, replica, generation)

    @appends
    def leave(self, unit: UnitOfWork, member: Membership, reason: str) -> None:
        """Leave the fleet: nobody waits for this replica any more. Idempotent."""
        row = unit.get(ReplicaRow, (member.line, member.replica))
        if row is None or row.generation != member.generation or row.state == "left":
            return
        self._of_replica(unit, kinds.REPLICA_LEFT, member, {"reason": reason})

    @appends
    def declare_lost(
        self,
        unit: UnitOfWork,
        line: str,
        replica: str,
        *,
        generation: int,
        counter: int,
        reason: str,
    ) -> bool:
        """Declare a silent replica lost, unless its heartbeat has moved from `counter` since.

        Returns:
            Whether it is now lost by this call.
        """
        row = unit.get(ReplicaRow, (line, replica))
        if row is None or row.state != "joined" or row.generation != generation:
            return False
        if unit.heartbeat(line, replica) != (generation, counter):
            return False
        self._append(
            unit,
            kinds.REPLICA_LOST,
            line=line,
            replica=replica,
            generation=generation,
            payload={"counter": counter, "reason": reason},
        )
        return True

    @appends
    def change_incarnation(
        self, unit: UnitOfWork, member: Membership, facts: EngineFacts, *, reason: str = ""
    ) -> None:
        """Record that the engine is another process now (or, with None, that none answers).

        Every ack of another incarnation is void from here on (I4). A no-op when nothing changed.
        """
        facts = _storable(facts)
        row = self._check_generation(unit, member)
        if row.incarnation != facts.incarnation:
            self._of_replica(
                unit,
                kinds.INCARNATION_CHANGED,
                member,
                {
                    "incarnation": facts.incarnation,
                    "build": facts.build,
                    "max_loras": facts.max_loras,
                    "keeps": _acks_in_force(unit, member.line, member.replica, facts),
                    "reason": reason[:500],
                },
            )

    @appends
    def fetched(self, unit: UnitOfWork, member: Membership, version: int, digest: str) -> None:
        """Record that the bytes are verified on this replica's own disk."""
        self._read_ahead(unit, member, version)
        self._check_generation(unit, member)
        self._of_replica(unit, kinds.VERSION_FETCHED, member, {"digest": digest}, version=version)

    @appends
    def ack(
        self,
        unit: UnitOfWork,
        member: Membership,
        version: int,
        *,
        digest: str,
        incarnation: str,
        build: str,
        probe: Sequence[float],
        tolerance: float = math.inf,
        fetched: bool = False,
        notes: Sequence[str] = (),
        phases: Mapping[str, float] | None = None,
    ) -> Event:
        """Record, checked, that an incarnation serves a version (I4).

        Args:
            unit: given by `appends`; callers leave it out.
            member: from `join`.
            version: its number.
            digest: of the bytes that were loaded; must be the published one.
            incarnation: read before and after; must be the replica's present one.
            build: of the engine, to know which probes are comparable.
            probe: log-probabilities (natural log) of the probe's tokens.
            tolerance: largest difference of a value from the first probe that was acked for this
                digest on this build. Compared here, under the lock, so that of two replicas at
                the same time one is the first.
            fetched: record as well that the bytes were fetched, which no event has recorded yet.
            notes: what is unusual about the probe; recorded with it.
            phases: seconds per watcher phase (notice, fetch, verify, load, probe).

        Raises:
            StaleGeneration: a newer watcher speaks for this replica.
            ProbeDisagrees: with the first replica's.
            Refused: another digest than the published one, or an incarnation that is gone.
        """
        self._read_ahead(unit, member, version)
        row = self._check_generation(unit, member)
        published = unit.get(VersionRow, (member.line, version))
        name = policy_name(member.line, version)
        if published is None or published.digest != digest:
            raise Refused(f"{name} is not published with digest {digest[:16]}")
        if row.incarnation != storable(incarnation):
            raise Refused(
                f"{name} was loaded into incarnation {incarnation}, the present one is "
                f"{row.incarnation}"
            )
        _compare_probes(unit, published, build, probe, tolerance)
        if fetched:
            self._of_replica(
                unit, kinds.VERSION_FETCHED, member, {"digest": digest}, version=version
            )
        event = self._of_replica(
            unit,
            kinds.VERSION_ACKED,
            member,
            {
                "digest": digest,
                "incarnation": incarnation,
                "build": build,
                "probe": repr_floats(probe),
                **({"notes": list(notes)} if notes else {}),
            },
            version=version,
        )
        unit.add_phases(event, member.replica, phases or {}, run=published.run)
        return event

    @appends
    def load_failed(
        self,
        unit: UnitOfWork,
        member: Membership,
        version: int,
        *,
        digest: str,
        reason: str,
        permanent: bool,
    ) -> None:
        """Record that a version could not be served; `permanent` rejects it on this replica."""
        self._check_generation(unit, member)
        self._of_replica(
            unit,
            kinds.VERSION_LOAD_FAILED,
            member,
            {"digest": digest, "reason": reason[:500], "permanent": permanent},
            version=version,
        )

    @appends
    def evicted(
        self, unit: UnitOfWork, member: Membership, version: int, *, digest: str, reason: str
    ) -> None:
        """Record that the engine no longer serves a version."""
        self._check_generation(unit, member)
        self._of_replica(
            unit,
            kinds.VERSION_EVICTED,
            member,
            {"digest": digest, "reason": reason},
            version=version,
        )

    @appends
    def foreign_adapter_seen(
        self, unit: UnitOfWork, member: Membership, name: str, path: str, why: str
    ) -> None:
        """Report an adapter on the engine that this ledger did not load. Once per observation."""
        self._check_generation(unit, member)
        self._of_replica(
            unit,
            kinds.FOREIGN_ADAPTER_SEEN,
            member,
            {"name": name[:256], "path": path[:512], "why": why},
        )

    @appends
    def probe_mismatch(
        self,
        unit: UnitOfWork,
        member: Membership,
        version: int,
        *,
        digest: str,
        reference: str,
        difference: float,
    ) -> None:
        """Report that a probe disagrees with the one that replica `reference` recorded."""
        self._check_generation(unit, member)
        self._of_replica(
            unit,
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
        dialect = self._engine.dialect
        with self._translating(), self._engine.connect() as plain:
            connection = plain.execution_options(write=True)
            beaten = connection.exec_driver_sql(*statements.BEAT.render(dialect, values))
            if beaten.rowcount != 1:
                key = {"line": member.line, "replica": member.replica}
                reading = ROW_BY_KEY[ReplicaRow].render(dialect, key)
                found = connection.exec_driver_sql(*reading).first()
                raise _stale(member, None if found is None else row_of(ReplicaRow, found))
            connection.commit()

    def _read_ahead(self, unit: UnitOfWork, member: Membership, version: int) -> None:
        """What every statement about a version needs, in one round trip."""
        unit.prefetch(
            (ReplicaRow, (member.line, member.replica)),
            (LineRow, (member.line,)),
            (VersionRow, (member.line, version)),
            (ResidencyRow, (member.line, member.replica, version)),
        )

    def _of_replica(
        self,
        unit: UnitOfWork,
        kind: str,
        member: Membership,
        payload: Mapping[str, Any],
        *,
        version: int | None = None,
    ) -> Event:
        return self._append(
            unit,
            kind,
            line=member.line,
            version=version,
            replica=member.replica,
            generation=member.generation,
            payload=payload,
        )

    def _check_generation(self, unit: UnitOfWork, member: Membership) -> ReplicaRow:
        row = unit.get(ReplicaRow, (member.line, member.replica))
        if row is None or row.generation != member.generation or row.state != "joined":
            raise _stale(member, row)
        return row


def _storable(facts: EngineFacts) -> EngineFacts:
    return EngineFacts(**storable(asdict(facts)))


def _acks_in_force(
    unit: UnitOfWork, line: str, replica: str, facts: EngineFacts
) -> list[dict[str, Any]]:
    """What the replica serves from now on without a new ack, so that as-of need not look back."""
    return [
        {"version": row.version, "digest": row.digest, "acked_at": row.acked_at}
        for row in unit.acks_in_force(line, replica, facts.incarnation)
    ]


def _stale(member: Membership, row: ReplicaRow | None) -> StaleGeneration:
    now = "unknown" if row is None else f"{row.state} with generation {row.generation}"
    return StaleGeneration(
        f"replica {member.replica!r} is {now}, this watcher has {member.generation}",
        hint="join again; if two sidecars share a name, give each its own --replica",
    )


def repr_floats(values: Sequence[float]) -> str:
    """JSON list of floats that reads back exactly."""
    return "[" + ",".join(repr(float(v)) for v in values) + "]"


def _compare_probes(
    unit: UnitOfWork, version: VersionRow, build: str, probe: Sequence[float], tolerance: float
) -> None:
    """Refuse a probe that disagrees with the first of the same digest and build (I4)."""
    if tolerance == math.inf:
        return
    comparable = [
        row
        for row in unit.residency(version.line, version.version).values()
        if row.acked_seq is not None
        and row.digest == version.digest
        and row.build == storable(build)
        and row.probe
    ]
    if not comparable:
        return
    first = min(comparable, key=lambda row: row.acked_seq or 0)
    difference = largest_difference(probe, first.probe)
    if not difference <= tolerance:
        raise ProbeDisagrees(
            f"its probe differs by {difference:.3g} from that of {first.replica} on the same "
            "engine build",
            reference=first.replica,
            difference=difference,
        )
