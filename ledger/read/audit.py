"""Audit: the full story of one version, and which one answered a request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from policyline.ledger import events as kinds
from policyline.ledger.events import Event
from policyline.ledger.names import policy_name
from policyline.ledger.read.queries import Queries
from policyline.ledger.read.rollout_queries import PhaseRow
from policyline.ledger.rollouts import RolloutFilter, RolloutRow
from policyline.ledger.rows import VersionRow


@dataclass(frozen=True, slots=True)
class Serving:
    """One stretch of time in which one incarnation of a replica served the version."""

    replica: str
    incarnation: str
    acked_at: str
    """Of the ack, or of its watcher's return when the ack was still in force."""
    acked_seq: int
    ended_at: str | None
    """None while it still serves."""
    ended_by: str | None
    """evicted, incarnation changed, replica left or lost."""


@dataclass(frozen=True, slots=True)
class VersionAudit:
    """Everything the ledger knows about a version."""

    row: VersionRow
    name: str
    servings: tuple[Serving, ...]
    events: tuple[Event, ...]
    phases: tuple[PhaseRow, ...]
    rollouts: dict[str, int]
    """Replica -> how many rollouts it answered from this version."""


_ENDS_A_VERSION = {kinds.VERSION_EVICTED, kinds.VERSION_LOAD_FAILED, kinds.VERSION_ACKED}
_REPLICA_LIFECYCLE = {
    kinds.REPLICA_JOINED,
    kinds.REPLICA_LEFT,
    kinds.REPLICA_LOST,
    kinds.INCARNATION_CHANGED,
}
_PAGE = 20


def audit(ledger: Queries, line: str, version: int) -> VersionAudit:
    """Find who published a version and when, and who served it from when to when.

    Raises:
        NotFound: never reserved on this line.
    """
    row = ledger.version(line, version)
    own = list(ledger.events(line=line, version=version))
    return VersionAudit(
        row=row,
        name=policy_name(line, version),
        servings=tuple(s for ack in own if _is_ack(ack) for s in _stretches(ledger, ack, own)),
        events=tuple(own),
        phases=tuple(ledger.phases(line=line, version=version)),
        rollouts=ledger.rollout_counts(line, version),
    )


def find_rollout(ledger: Queries, request: str) -> RolloutRow | None:
    """The rollout of a request, by the router's id or by what vLLM made of it; None without one.

    The router sends its id as `X-Request-Id`. vLLM 0.32 answers with `cmpl-<id>` or
    `chatcmpl-<id>` (entrypoints/openai: completion and chat_completion, serving.py), and its log
    appends the prompt's number and 8 random digits (v1/engine/input_processor.py).
    """
    given = [request]
    if made := _VLLM_ID.fullmatch(request):
        given.append(made["sent"])
        given.append(_VLLM_LOG_SUFFIX.sub("", made["sent"]))
    rows = (next(ledger.rollouts(RolloutFilter(request=id_, limit=1)), None) for id_ in given)
    return next((row for row in rows if row is not None), None)


_VLLM_ID = re.compile("(?:chat)?cmpl-(?P<sent>.+)")
_VLLM_LOG_SUFFIX = re.compile("(?:-[0-9]+)?(?:-[0-9a-f]{8})?$")


def _is_ack(event: Event) -> bool:
    return event.kind == kinds.VERSION_ACKED and event.replica is not None


def _stretches(ledger: Queries, ack: Event, own: list[Event]) -> Iterator[Serving]:
    """When the ack was in force: until its end, except while its watcher was away."""
    last = next((e for e in own if e.seq > ack.seq and _supersedes(e, ack)), None)
    incarnation = ack.data["incarnation"]
    began: Event | None = ack
    for event in _lifecycle(ledger, ack, last):
        present = event.data.get("incarnation")  # None when it left or was lost
        if began is not None and present != incarnation:
            yield _serving(ack, began, event)
            began = None
        elif began is None and present == incarnation:
            began = event
        if present not in {None, incarnation}:
            return  # another process: this ack never comes back
    if began is not None:
        yield _serving(ack, began, last)


def _supersedes(event: Event, ack: Event) -> bool:
    return event.replica == ack.replica and event.kind in _ENDS_A_VERSION


def _serving(ack: Event, began: Event, end: Event | None) -> Serving:
    return Serving(
        replica=ack.replica or "",
        incarnation=str(ack.data["incarnation"]),
        acked_at=began.recorded_at,
        acked_seq=began.seq,
        ended_at=end.recorded_at if end else None,
        ended_by=end.kind.replace("_", " ") if end else None,
    )


def _lifecycle(ledger: Queries, ack: Event, last: Event | None) -> Iterator[Event]:
    """Joins, ends and changes of the replica after the ack, up to `last`."""
    after = ack.seq
    while True:
        page = ledger.next_replica_events(ack.line, ack.replica or "", after, _PAGE)
        for event in page:
            if last is not None and event.seq > last.seq:
                return
            if event.kind in _REPLICA_LIFECYCLE:
                yield event
        if len(page) < _PAGE:
            return
        after = page[-1].seq
