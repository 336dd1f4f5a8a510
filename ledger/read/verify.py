"""Does the ledger add up? Walks the chain, folds every event, compares what was derived."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from policyline.ledger import events as kinds
from policyline.ledger.checkpoint import line_states, text_hash
from policyline.ledger.disk_projections import DiskProjections
from policyline.ledger.errors import LedgerError
from policyline.ledger.events import GENESIS_HASH, Event, has_its_hash
from policyline.ledger.fold import apply
from policyline.ledger.manifest import Anchor, Manifest
from policyline.ledger.read.batches import BatchCheck
from policyline.ledger.read.projections import ProjectionSnapshot
from policyline.ledger.read.queries import Queries
from policyline.ledger.rows import ROW_TYPES, LineRow, Row

MAX_PROBLEMS = 100
"""Enough to see what is wrong; a ledger with a broken row would otherwise repeat itself."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that does not add up."""

    seq: int | None
    """The event concerned, where one can be named."""
    what: str
    remedy: str = ""
    """What to do about it, as an imperative."""


RESTORE = "restore a backup: docs/backup.md"
REPAIR = "once the events hold, run: policyline ledger repair-projections"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked and found."""

    events: int
    head_seq: int
    head_hash: str
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether everything adds up."""
        return not self.problems


def verify(
    ledger: Queries, *, on_progress: Callable[[int], None] = lambda _seq: None
) -> VerifyReport:
    """Check chain, anchors and projections. Reads only; events are streamed.

    Writers may go on meanwhile: what is appended during the walk is folded too, and the
    projections are compared at one event.
    """
    found: list[Problem] = []
    for table in ledger.missing_tables():
        _report(found, None, f"table {table} is missing")
    if found:  # nothing else can be read to its end
        return VerifyReport(0, 0, GENESIS_HASH, tuple(found))
    walk = _Walk(found)
    batches = BatchCheck(ledger)
    checkpoints = ledger.checkpoint_hashes()
    with DiskProjections() as tables:
        while True:
            for event in ledger.all_events(after=walk.seq):
                walk.take(event)
                _fold(tables, event, found)
                if event.kind == kinds.ROLLOUTS_RECORDED:
                    _check_batch(batches, tables, event, found)
                if event.seq in checkpoints:
                    _check_checkpoints(checkpoints.pop(event.seq), tables, event.seq, found)
                if event.seq % 10_000 == 0:
                    on_progress(event.seq)
            if _compare(ledger, tables, walk, batches, found):
                break
    for seq in sorted(checkpoints):
        _report(found, seq, f"there is a checkpoint of event {seq}, which there is not", REPAIR)
    return VerifyReport(walk.count, walk.seq, walk.hash, tuple(found))


class _Walk:
    """The position in the chain, and the hashes that anchors may name."""

    def __init__(self, found: list[Problem]) -> None:
        self._found = found
        self._anchors: dict[int, tuple[str, int | None]] = {}
        self.seq = 0
        self.count = 0
        self.hash = GENESIS_HASH
        self.time = ""

    def take(self, event: Event) -> None:
        """Check one event against its predecessor and itself."""
        if event.seq != self.seq + 1:
            self._report(self.seq + 1, f"event {self.seq + 1} is missing")
        if event.prev_hash != self.hash:
            self._report(event.seq, f"event {event.seq} does not follow the event before it")
        if not has_its_hash(event):
            self._report(event.seq, f"event {event.seq} was changed: its hash does not match")
        self._check_time(event)
        if event.kind == kinds.VERSION_RESERVED:
            self._anchors[event.seq] = (event.hash, event.version)
        if event.kind == kinds.VERSION_PUBLISHED:
            self._check_anchor(event)
        self.seq, self.hash = event.seq, event.hash
        self.count += 1

    def _check_time(self, event: Event) -> None:
        at = event.recorded_at
        try:
            datetime.fromisoformat(at)
            goes_on = at >= self.time
        except (TypeError, ValueError):
            self._report(
                event.seq, f"event {event.seq} is recorded at {at!r:.40}, which is no time"
            )
            return
        if not goes_on:
            self._report(
                event.seq, f"event {event.seq} is recorded before its predecessor, at {at}"
            )
        self.time = at

    def _check_anchor(self, event: Event) -> None:
        try:
            anchor: Anchor = Manifest.from_text(event.data["manifest"]).anchor
        except (LedgerError, KeyError, TypeError, ValueError) as error:
            self._report(event.seq, f"event {event.seq} carries an unusable manifest: {error}")
            return
        expected = self._anchors.pop(anchor.seq, None)
        if expected != (anchor.hash, event.version):
            self._report(
                event.seq, f"event {event.seq}: its manifest is anchored elsewhere in the chain"
            )

    def _report(self, seq: int | None, what: str) -> None:
        _report(self._found, seq, what)


def _fold(tables: DiskProjections, event: Event, found: list[Problem]) -> None:
    try:
        apply(tables, event)
    except LedgerError as error:
        _report(found, event.seq, str(error))
    except (TypeError, ValueError, sqlite3.Error) as error:
        _report(found, event.seq, f"event {event.seq} cannot be folded: {error!r:.100}")


def _check_batch(
    batches: BatchCheck, tables: DiskProjections, event: Event, found: list[Problem]
) -> None:
    line = tables.get(LineRow, (event.line,))
    try:
        wrong = batches.take(event, line.current if line else None)
    except (LedgerError, KeyError, TypeError, ValueError) as error:
        wrong = f"its rollouts cannot be checked: {error}"
    if wrong is not None:
        _report(found, event.seq, f"event {event.seq}: {wrong}")


def _check_checkpoints(
    noted: dict[str, str], tables: DiskProjections, seq: int, found: list[Problem]
) -> None:
    """Without one as-of folds more; with a wrong one it would answer wrongly."""
    states = line_states(tables)
    for line, sha256 in noted.items():
        if text_hash(states.get(line, "")) != sha256:
            _report(found, seq, f"the checkpoint of line {line!r} at event {seq} is wrong", REPAIR)


def _compare(
    ledger: Queries, tables: DiskProjections, walk: _Walk, batches: BatchCheck, found: list[Problem]
) -> bool:
    """Compare the projections with the fold; False when events were appended meanwhile."""
    with ledger.projections() as now:
        head_seq, head_hash = now.head
        if type(head_seq) is not int:  # SQLite accepts text there
            _report(found, None, f"the head's seq is {head_seq!r:.40}, which is no number")
        elif head_seq > walk.seq and now.has_events_after(walk.seq):
            return False
        elif (head_seq, head_hash) != (walk.seq, walk.hash):
            found.append(
                Problem(
                    walk.seq + 1,
                    f"the head counts {head_seq} events, the chain ends at {walk.seq}: "
                    "events were cut off",
                    RESTORE,
                )
            )
        elif walk.count and now.head_time() != walk.time:
            what = f"the head has event {walk.seq} recorded at {now.head_time()!r:.40}"
            _report(found, walk.seq, f"{what}, the event itself at {walk.time!r:.40}", REPAIR)
        last_rollout = now.last_rollout()
        for table in ROW_TYPES:
            try:
                _compare_table(now, tables, table, found)
            except (TypeError, ValueError, sqlite3.Error) as error:
                what = f"projection {table.table} holds what cannot be read: {error!r:.100}"
                _report(found, None, what, REPAIR)
        for number, seq, name in now.orphaned_phases(MAX_PROBLEMS):
            what = f"row {number} of phases: no event {seq} published or acked {name}"
            _report(found, seq, what)
    for wrong in batches.rest(last_rollout):
        _report(found, None, wrong)
    return True


def _compare_table(
    now: ProjectionSnapshot, tables: DiskProjections, table: type[Row], found: list[Problem]
) -> None:
    seen = 0
    for page in now.pages(table):
        made = tables.get_many(table, [row.key for row in page])
        seen += len(made)
        for row in page:
            folded = made.get(row.key)
            if folded != row:
                _report(found, None, _difference(row, folded), REPAIR)
    if seen < tables.count(table):
        _report_missing(now, tables, table, found)


def _report_missing(
    now: ProjectionSnapshot, tables: DiskProjections, table: type[Row], found: list[Problem]
) -> None:
    there = {row.key for page in now.pages(table) for row in page}
    for row in tables.rows(table):
        if row.key not in there:
            _report(found, None, f"projection {table.table} lacks {row.key}", REPAIR)


def _report(found: list[Problem], seq: int | None, what: str, remedy: str = RESTORE) -> None:
    if len(found) < MAX_PROBLEMS:
        found.append(Problem(seq, what, remedy))


def _difference(row: Row, folded: Row | None) -> str:
    if folded is None:
        return f"projection {row.table} has {row.key}, which no event made"
    fields = ", ".join(
        f"{f.name} is {getattr(row, f.name)!r:.60}, events give {getattr(folded, f.name)!r:.60}"
        for f in dataclasses.fields(row)
        if getattr(row, f.name) != getattr(folded, f.name)
    )
    return f"projection {row.table} {row.key}: {fields}"
