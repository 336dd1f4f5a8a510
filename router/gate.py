"""The gate: what to answer for a model name, given one view of the ledger. Pure.

A request for a version goes only to replicas whose present incarnation holds an ack for it (I2);
never to another version, and never to the base model, in place of the one that was named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import parse_policy_name, policy_name
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, VersionRow
from policyline.router.texts import cut

MODEL_MISSING: Final = "model_missing"
POLICY_UNKNOWN: Final = "policy_unknown"
RUN_UNKNOWN: Final = "run_unknown"
POLICY_EVICTED: Final = "policy_evicted"
POLICY_WITHDRAWN: Final = "policy_withdrawn"
POLICY_NOT_READY: Final = "policy_not_ready"


@dataclass(frozen=True, slots=True)
class Seat:
    """One life of a vLLM server that serves a version."""

    replica: str
    incarnation: str
    url: str
    slots: int | None
    """`--max-loras`: how many versions may be in flight at once; None when it is not known."""
    acked_seq: int
    """The event of the ack that vouches for it."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Ask one of these."""

    version: int
    name: str
    digest: str
    run: str
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Published, but nobody's ack is in force: it may come."""

    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """It will never be served, or the request names nothing."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Look:
    """The view does not cover this version: read the ledger with it."""

    version: int


Verdict = Serve | Wait | Refuse | Look


@dataclass(frozen=True, slots=True)
class Mark:
    """An engine said that it has no such model, although its replica's ack is in force."""

    replica: str
    incarnation: str
    version: int
    acked_seq: int
    """The ack that was wrong; a newer one counts again."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One view, prepared for quick answers."""

    line: LineRow
    verdicts: Mapping[int, Verdict]
    """For every version that the view covers."""

    @property
    def current(self) -> int | None:
        """The version that an alias means."""
        return self.line.current

    def judge(self, name: object) -> Verdict:
        """What to answer for the request's `model`."""
        if not isinstance(name, str) or not name:
            return Refuse(
                400,
                MODEL_MISSING,
                "the request names no model; it would be answered by the base model"
                if name is None or name == ""
                else f"the request's model is {cut(name)}, which is no name of a policy version",
            )
        version = parse_policy_name(self.line.line, name)
        if version is None:
            return _unknown(name)
        return self.judge_version(version)

    def judge_version(self, version: int) -> Verdict:
        """What to answer for a version of the line."""
        # even a number that was not reserved yet may be news: only a fresh view may say 404
        return self.verdicts.get(version) or Look(version)


def prepare(view: LineSnapshot, marks: Collection[Mark] = ()) -> Gate:
    """Turn a view into a gate.

    Args:
        view: with the versions that are asked for among its `others`.
        marks: acks that their engines contradicted.
    """
    distrusted = {(m.replica, m.incarnation, m.version, m.acked_seq) for m in marks}
    verdicts: dict[int, Verdict] = {}
    for desired in view.desired:
        seats = _seats(view, desired.version, distrusted)
        verdicts[desired.version] = (
            Serve(desired.version, desired.name, desired.digest, desired.row.run, seats)
            if seats
            else Wait(desired.version, f"{desired.name} is not acked by any replica now")
        )
    for row in view.others.values():
        verdicts[row.version] = _outside(view, row)
    return Gate(view.line, verdicts)


def absent(gate: Gate, version: int) -> Refuse:
    """The answer for a version that even a fresh view does not hold."""
    return _unknown(policy_name(gate.line.line, version))


def _seats(
    view: LineSnapshot, version: int, distrusted: Collection[tuple[str, str, int, int]]
) -> tuple[Seat, ...]:
    found = []
    for name, replica in sorted(view.replicas.items()):
        said = view.residency.get((name, version))
        if said is not None and is_acked(replica, said) and replica.url:
            seat = _seat(replica, said)
            if (name, seat.incarnation, version, seat.acked_seq) not in distrusted:
                found.append(seat)
    return tuple(found)


def _seat(replica: ReplicaRow, said: ResidencyRow) -> Seat:
    return Seat(
        replica=replica.replica,
        incarnation=replica.incarnation or "",
        url=replica.url,
        slots=replica.max_loras,
        acked_seq=said.acked_seq or 0,
    )


def _unknown(name: str) -> Refuse:
    return Refuse(404, POLICY_UNKNOWN, f"{cut(name)} was never published on this line")


def _outside(view: LineSnapshot, row: VersionRow) -> Verdict:
    """The answer for a version that is not desired."""
    name = policy_name(row.line, row.version)
    match row.state:
        case "reserved":
            return Refuse(404, POLICY_UNKNOWN, f"{name} is reserved but not published")
        case "rejected":
            return Refuse(404, POLICY_UNKNOWN, f"{name} was never published: {row.reason}")
        case "withdrawn":
            return Refuse(410, POLICY_WITHDRAWN, f"{name} was withdrawn: {row.reason}")
        case "skipped":
            return Refuse(410, POLICY_EVICTED, f"{name} was skipped: {row.reason}")
        case "published":
            pass
    waits = row.became_current_seq is None and row.run == view.line.open_run
    if waits and row.version > (view.current or 0):
        return Wait(row.version, f"{name} is published and waits to become the candidate")
    current = "nothing" if view.current is None else policy_name(row.line, view.current)
    return Refuse(410, POLICY_EVICTED, f"{name} is outside the window; current is {current}")
