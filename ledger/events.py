"""Events: what happened, and the hash that chains each to its predecessor. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

from policyline.ledger.canonical import canonical, parse_object
from policyline.ledger.errors import VERIFY_HINT, Corrupted

PAYLOAD_SCHEMA: Final = 1
GENESIS_HASH: Final = "0" * 64

RUN_OPENED: Final = "run_opened"
RUN_CLOSED: Final = "run_closed"
EPOCH_CLAIMED: Final = "epoch_claimed"
EPOCH_RELEASED: Final = "epoch_released"
VERSION_RESERVED: Final = "version_reserved"
VERSION_PUBLISHED: Final = "version_published"
VERSION_REJECTED: Final = "version_rejected"
VERSION_WITHDRAWN: Final = "version_withdrawn"
CANDIDATE_NAMED: Final = "candidate_named"
CURRENT_ADVANCED: Final = "current_advanced"
CURRENT_ROLLED_BACK: Final = "current_rolled_back"
REPLICA_JOINED: Final = "replica_joined"
REPLICA_LEFT: Final = "replica_left"
REPLICA_LOST: Final = "replica_lost"
INCARNATION_CHANGED: Final = "incarnation_changed"
VERSION_FETCHED: Final = "version_fetched"
VERSION_ACKED: Final = "version_acked"
VERSION_LOAD_FAILED: Final = "version_load_failed"
VERSION_EVICTED: Final = "version_evicted"
VERSION_RETRIED: Final = "version_retried"
VERSION_PINNED: Final = "version_pinned"
VERSION_UNPINNED: Final = "version_unpinned"
FLEET_PAUSED: Final = "fleet_paused"
FLEET_RESUMED: Final = "fleet_resumed"
ARTIFACT_COLLECTED: Final = "artifact_collected"
FOREIGN_ADAPTER_SEEN: Final = "foreign_adapter_seen"
PROBE_MISMATCH: Final = "probe_mismatch"
ROLLOUTS_RECORDED: Final = "rollouts_recorded"

DETAILS: Final = frozenset(
    {
        VERSION_RESERVED,
        INCARNATION_CHANGED,
        VERSION_FETCHED,
        VERSION_ACKED,
        VERSION_LOAD_FAILED,
        VERSION_EVICTED,
        ARTIFACT_COLLECTED,
        FOREIGN_ADAPTER_SEEN,
        PROBE_MISMATCH,
        ROLLOUTS_RECORDED,
    }
)
"""Kinds that leave every other replica's desired set as it is: its watcher need not wake for them.
What follows from one, as a version that becomes current, is an event of its own."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that is to be appended; the ledger adds order, time and hash."""

    kind: str
    line: str
    run: str
    key: str
    actor: str
    payload: Mapping[str, Any]
    version: int | None = None
    replica: str | None = None
    epoch: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One row of `events`. `payload` is the canonical JSON text that was hashed."""

    seq: int
    line: str
    run: str
    """The run concerned; for events of a replica the line's open run, "" when there is none."""
    kind: str
    version: int | None
    replica: str | None
    actor: str
    epoch: int | None
    generation: int | None
    key: str
    payload: str
    recorded_at: str
    """UTC, ISO 8601 with microseconds and offset; never less than its predecessor's."""
    prev_hash: str
    hash: str

    @property
    def data(self) -> dict[str, Any]:
        """The payload, parsed.

        Raises:
            Corrupted: it is not a JSON object; names the event.
        """
        try:
            return parse_object(self.payload)
        except ValueError as error:
            raise Corrupted(
                f"event {self.seq} ({self.kind}) has an unreadable payload: {error}",
                seq=self.seq,
                hint=VERIFY_HINT,
            ) from error

    @property
    def moment(self) -> datetime:
        """`recorded_at`, parsed.

        Raises:
            Corrupted: it is not a time; names the event.
        """
        try:
            return datetime.fromisoformat(self.recorded_at)
        except ValueError as error:
            raise Corrupted(
                f"event {self.seq} ({self.kind}) has an unreadable time: {error}",
                seq=self.seq,
                hint=VERIFY_HINT,
            ) from error

    def is_the_same_fact(self, new: NewEvent) -> bool:
        """Whether `new` states this very fact, so that appending it again is a retry."""
        return (
            self.kind == new.kind
            and self.line == new.line
            and self.version == new.version
            and self.replica == new.replica
            and self.payload == payload_text(new.payload)
        )


def payload_text(payload: Mapping[str, Any]) -> str:
    """Canonical JSON of a payload with its schema number."""
    return canonical({**payload, "schema": PAYLOAD_SCHEMA})


def seal(new: NewEvent, *, seq: int, recorded_at: str, prev_hash: str) -> Event:
    """Give a new event its number, time and hash in the chain."""
    columns = (
        seq,
        new.line,
        new.run,
        new.kind,
        new.version,
        new.replica,
        new.actor,
        new.epoch,
        new.generation,
        new.key,
        payload_text(new.payload),
        recorded_at,
        prev_hash,
    )
    return Event(*columns, hash=columns_hash(columns))


def event_hash(event: Event) -> str:
    """sha256 hex over the canonical text of every column but `hash` itself."""
    return columns_hash(_HASHED(event))


def has_its_hash(event: Event) -> bool:
    """Whether the event's hash is of its columns.

    SQLite accepts a value of any type; no hash is made of those.
    """
    try:
        return event_hash(event) == event.hash
    except (TypeError, ValueError):
        return False


def columns_hash(columns: Sequence[object]) -> str:
    """`event_hash` of the columns before `hash`, in their order."""
    return hashlib.sha256(canonical(list(columns)).encode()).hexdigest()


_HASHED = attrgetter(*Event.__slots__[:-1])
