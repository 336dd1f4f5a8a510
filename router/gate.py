"""The gate: what to answer for a model name, given one view of the ledger. Pure.

A request for a version goes only to replicas whose present incarnation holds an ack for it (I2);
never to another version, and never to the base model, instead of the one that was named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import parse_policy_name, policy_name
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import LineRow, VersionRow

MODEL_MISSING: Final = "model_missing"
POLICY_UNKNOWN: Final = "policy_unknown"
RUN_UNKNOWN: Final = "run_unknown"
POLICY_EVICTED: Final = "policy_evicted"
POLICY_WITHDRAWN: Final = "policy_withdrawn"
POLICY_NOT_READY: Final = "policy_not_ready"
_MAX_SHOWN_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One incarnation of a vLLM server that has acked a version."""

    replica: str
    incarnation: str
    url: str
    slots: int | None
    """`--max-loras`: how many versions may be in flight at once; None when it is not known."""
    acked_seq: int
    """Sequence number of the event that holds the ack."""


@dataclass(frozen=True, slots=True)
class Serve:
    """The version is acked: send the request to one of these endpoints."""

    version: int
    name: str
    digest: str
    run: str
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class NotReady:
    """Published, but no replica holds a valid ack yet; the request waits."""

    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The version cannot be served, or the request names none."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class NotInView:
    """The view does not cover this version; a new read of the ledger has to include it."""

    version: int


Verdict = Serve | NotReady | Refuse | NotInView


DistrustedAck = tuple[Endpoint, int]
"""A version, and an endpoint whose engine answered that it has no such model although its ack is
valid. A newer ack is trusted again: it makes another endpoint."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One view of the line, with the verdict for each version computed in advance."""

    line: LineRow
    verdicts: Mapping[int, Verdict]
    """For every version that the view covers."""

    @property
    def current(self) -> int | None:
        """The version that the alias stands for."""
        return self.line.current

    def judge(self, name: object) -> Verdict:
        """The verdict on a request's `model` field."""
        if not isinstance(name, str) or not name:
            return Refuse(
                400,
                MODEL_MISSING,
                "the request names no model; it would be answered by the base model"
                if name is None or name == ""
                else f"the request's model is {shorten(name)}, not the name of a policy version",
            )
        version = parse_policy_name(self.line.line, name)
        if version is None:
            return _unknown(name)
        return self.judge_version(version)

    def judge_version(self, version: int) -> Verdict:
        """The verdict on a version of the line."""
        # A number that was not reserved at the last read may exist now: only a new read proves 404.
        return self.verdicts.get(version) or NotInView(version)


def prepare(view: LineSnapshot, distrusted: Collection[DistrustedAck] = ()) -> Gate:
    """Compute the verdicts of a view.

    Args:
        view: its `others` hold the versions that clients asked for outside the desired set.
        distrusted: acks that their engines contradicted; they do not count.
    """
    verdicts: dict[int, Verdict] = {}
    for desired in view.desired:
        endpoints = _endpoints(view, desired.version, distrusted)
        verdicts[desired.version] = (
            Serve(desired.version, desired.name, desired.digest, desired.row.run, endpoints)
            if endpoints
            else NotReady(desired.version, f"{desired.name} is not acked by any replica now")
        )
    for row in view.others.values():
        verdicts[row.version] = _not_desired(view, row)
    return Gate(view.line, verdicts)


def absent(gate: Gate, version: int) -> Refuse:
    """The verdict on a version that a new read does not hold either."""
    return _unknown(policy_name(gate.line.line, version))


def _endpoints(
    view: LineSnapshot, version: int, distrusted: Collection[DistrustedAck]
) -> tuple[Endpoint, ...]:
    found = []
    for name, replica in sorted(view.replicas.items()):
        residency = view.residency.get((name, version))
        if residency is None or not is_acked(replica, residency) or not replica.url:
            continue
        endpoint = Endpoint(
            replica=name,
            incarnation=replica.incarnation or "",
            url=replica.url,
            slots=replica.max_loras,
            acked_seq=residency.acked_seq or 0,
        )
        if (endpoint, version) not in distrusted:
            found.append(endpoint)
    return tuple(found)


def _unknown(name: str) -> Refuse:
    return Refuse(404, POLICY_UNKNOWN, f"{shorten(name)} was never published on this line")


def _not_desired(view: LineSnapshot, row: VersionRow) -> Verdict:
    """The verdict on a version that is not in the desired set."""
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
        return NotReady(row.version, f"{name} is published and waits to become the candidate")
    current = "nothing" if view.current is None else policy_name(row.line, view.current)
    return Refuse(410, POLICY_EVICTED, f"{name} is out of the window; current is {current}")


def shorten(value: object) -> str:
    """A client's value for an error message: its `repr`, at most 200 characters and an ellipsis."""
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
