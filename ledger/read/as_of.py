"""As-of: what a line served at an event or a time, without folding from the beginning.

Every `CHECKPOINT_EVERY` events the append notes, per line, what the fold needs to go on
from there: the line, its replicas, and the acks in force. As-of takes the newest note not after
the event asked for and folds the few events between.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from policyline.ledger import events as kinds
from policyline.ledger.checkpoint import rows_of
from policyline.ledger.errors import InvalidTime, NotFound
from policyline.ledger.events import Event
from policyline.ledger.fold import apply
from policyline.ledger.names import policy_name
from policyline.ledger.projection_store import InMemoryProjections
from policyline.ledger.read.queries import Queries
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, Row, RunRow, VersionRow

R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Served:
    """A version that a replica served."""

    replica: str
    version: int
    name: str
    digest: str
    incarnation: str
    acked_at: str | None


@dataclass(frozen=True, slots=True)
class AsOf:
    """A line at one event."""

    seq: int
    recorded_at: str
    line: str
    run: str | None
    current: int | None
    candidate: int | None
    served: tuple[Served, ...]


class _Tables(InMemoryProjections):
    """Memory that starts from a checkpoint.

    What a version or a run was then does not matter for who served it, and checkpoints do not
    hold it: such a row is made up when an event changes it.
    """

    def get(self, table: type[R], key: tuple[str | int, ...]) -> R | None:
        """The row, made up where only its existence matters."""
        found = super().get(table, key)
        if found is not None:
            return found
        made_up: Row | None = None
        if table is VersionRow:
            made_up = VersionRow(str(key[0]), int(key[1]), "", 0, "", "published", "", 0)
        elif table is RunRow:
            made_up = RunRow(
                str(key[0]), "", "open", 0, None, "", 0, None, 0.0, 0.0, 0, "", None, None, None
            )
        elif table is ReplicaRow:
            made_up = ReplicaRow(str(key[0]), str(key[1]), 0, "left", None, "", "", None, 0, "")
        return made_up if isinstance(made_up, table) else None


def as_of(ledger: Queries, line: str, seq: int) -> AsOf:
    """What `line` served right after event `seq`.

    Raises:
        NotFound: there is no such event.
    """
    head, _ = ledger.head()
    if not 1 <= seq <= head:
        raise NotFound(f"event {seq} does not exist, the ledger has events 1 to {head}")
    noted, text = ledger.checkpoint_before(line, seq)
    tables = _Tables()
    if text:
        for noted_row in rows_of(text):
            tables.put(noted_row)
    for event in ledger.events(after=noted, line=line, last=seq):
        apply(tables, event)
        _restore_acks(tables, event)
    recorded_at = next(ledger.events(after=seq - 1, limit=1)).recorded_at
    row = tables.get(LineRow, (line,)) or LineRow(line=line)
    replicas = tables.all(ReplicaRow)
    return AsOf(
        seq=seq,
        recorded_at=recorded_at,
        line=line,
        run=row.open_run,
        current=row.current,
        candidate=row.candidate,
        served=tuple(
            Served(
                replica=resident.replica,
                version=resident.version,
                name=policy_name(line, resident.version),
                digest=resident.digest,
                incarnation=resident.incarnation or "",
                acked_at=resident.acked_at,
            )
            for _, resident in sorted(tables.all(ResidencyRow).items())
            if resident.line == line and is_acked(replicas[line, resident.replica], resident)
        ),
    )


def _restore_acks(tables: _Tables, event: Event) -> None:
    """Acks that came back in force with their watcher; a checkpoint does not hold them."""
    if event.kind not in {kinds.REPLICA_JOINED, kinds.INCARNATION_CHANGED}:
        return
    data = event.data
    for ack in data.get("keeps", ()):
        tables.put(
            ResidencyRow(
                line=event.line,
                replica=event.replica or "",
                version=ack["version"],
                state="acked",
                generation=event.generation or 0,
                incarnation=data["incarnation"],
                digest=ack["digest"],
                acked_at=ack["acked_at"],
            )
        )


def seq_at(ledger: Queries, moment: str, now: datetime) -> int:
    """The last event recorded at or before a time.

    Args:
        ledger: to search.
        moment: ISO 8601; without an offset it is UTC, without a date today's.
        now: gives today.

    Raises:
        InvalidTime: not a time.
        NotFound: before the first event.
    """
    time = parse_time(moment, now)
    seq = ledger.last_seq_until(time)
    if seq is None:
        raise NotFound(f"the ledger has no event at or before {time}")
    return seq


def parse_time(moment: str, now: datetime) -> str:
    """ISO text in UTC with microseconds, as events record it.

    Raises:
        InvalidTime: not a time.
    """
    text = moment.strip()
    if len(text) > 2 and text[2] == ":":
        text = f"{now.astimezone(UTC):%Y-%m-%d}T{text}"
    try:
        parsed = datetime.fromisoformat(text)
        if parsed.tzinfo is None:
            parsed = parsed.replace(tzinfo=UTC)
        in_utc = parsed.astimezone(UTC)
    except (ValueError, OverflowError) as error:  # the latter at the ends of the calendar
        raise InvalidTime(
            f"{moment!r} is neither an event number nor a time",
            hint="write a number, 2026-01-31T12:00:00Z, or 12:00 for today (UTC)",
        ) from error
    return in_utc.isoformat(timespec="microseconds")
