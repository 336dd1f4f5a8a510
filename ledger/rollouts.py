"""Rollouts: which request was answered from which version. Append-only facts outside the fold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from policyline.ledger.canonical import canonical


@dataclass(frozen=True, slots=True)
class NewRollout:
    """One answered request, as its router saw it. Times are seconds."""

    request: str
    """Unique for ever: the router's own id of the request."""
    run: str
    version: int
    replica: str
    asked_name: str
    """The model name in the request: a policy name, an alias, or a trainer's own number."""
    status: int
    """HTTP status of the answer."""
    started_at: str
    """UTC, ISO 8601, by the router's clock."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """To the first token."""
    decode_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    episode: str = ""
    """Groups the requests of one episode or sample group, where the client names it."""


HASHED_FIELDS = tuple(f.name for f in fields(NewRollout))
"""What the hash of a batch covers; the rest follows from the batch's event."""


@dataclass(frozen=True, slots=True)
class RolloutRow(NewRollout):
    """A recorded rollout."""

    id: int = 0
    line: str = ""
    batch: str = ""
    staleness: int | None = None
    """How many versions current was ahead when the batch was recorded; None without a current."""


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts are wanted; None means any."""

    line: str | None = None
    run: str | None = None
    version: int | None = None
    replica: str | None = None
    request: str | None = None
    episode: str | None = None
    since: str | None = None
    """Started at or after this time (ISO 8601, UTC)."""
    until: str | None = None
    """Started before this time (ISO 8601, UTC)."""
    min_staleness: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class MixedEpisode:
    """An episode, or sample group, whose requests were answered from more than one version."""

    episode: str
    run: str
    requests: dict[int, int]
    """Version -> how many of its requests."""
    replicas: tuple[str, ...]
    first_at: str
    """When the first one started, UTC."""
    last_at: str


def rollouts_hash(rollouts: Sequence[NewRollout]) -> str:
    """sha256 hex over the canonical text of a batch, one line a rollout, in order."""
    return values_hash([getattr(r, name) for name in HASHED_FIELDS] for r in rollouts)


def values_hash(rollouts: Iterable[Sequence[object]]) -> str:
    """`rollouts_hash` of rows that hold `HASHED_FIELDS` in their order."""
    text = "".join([f"{canonical(list(values))}\n" for values in rollouts])
    return hashlib.sha256(text.encode()).hexdigest()
