"""Replay: the history of a run with the state of its line after each event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policyline.ledger.errors import NotFound
from policyline.ledger.events import Event
from policyline.ledger.fold import apply
from policyline.ledger.names import policy_name
from policyline.ledger.projection_store import InMemoryProjections
from policyline.ledger.read.queries import Queries
from policyline.ledger.readiness import is_acked
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, RunRow, VersionRow


@dataclass(frozen=True, slots=True)
class State:
    """A line as the events up to and including `seq` made it."""

    seq: int
    line: LineRow
    runs: dict[str, RunRow]
    versions: dict[int, VersionRow]
    replicas: dict[str, ReplicaRow]
    residency: dict[tuple[str, int], ResidencyRow]

    @property
    def current(self) -> int | None:
        """The version that new rollouts should ask for."""
        return self.line.current

    @property
    def candidate(self) -> int | None:
        """The version on its way to become current."""
        return self.line.candidate

    serving: dict[str, tuple[int, ...]]
    """Live replica -> the versions that its present incarnation has acked."""


class Replayer:
    """Folds events one after another and shows the state of one line."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._tables = InMemoryProjections()
        self._seq = 0

    def take(self, event: Event) -> None:
        """Fold one event."""
        apply(self._tables, event)
        self._seq = event.seq

    @property
    def line(self) -> LineRow:
        """The line's row now."""
        return self._tables.get(LineRow, (self._line,)) or LineRow(line=self._line)

    def served(self) -> dict[str, tuple[int, ...]]:
        """Live replica -> the versions that its present incarnation has acked. Cheap."""
        served: dict[str, list[int]] = {
            r.replica: []
            for r in self._tables.rows(ReplicaRow)
            if r.line == self._line and r.state == "joined"
        }
        for row in self._tables.acked.values():
            replica = self._tables.get(ReplicaRow, (row.line, row.replica))
            if row.line == self._line and replica is not None and is_acked(replica, row):
                served[row.replica].append(row.version)
        return {name: tuple(sorted(versions)) for name, versions in sorted(served.items())}

    def state(self) -> State:
        """The line now. A snapshot: later events do not change it."""
        line, tables = self._line, self._tables
        return State(
            seq=self._seq,
            line=self.line,
            runs={r.run: r for r in tables.all(RunRow).values() if r.line == line},
            versions={r.version: r for r in tables.all(VersionRow).values() if r.line == line},
            replicas={r.replica: r for r in tables.all(ReplicaRow).values() if r.line == line},
            residency={
                (r.replica, r.version): r
                for r in tables.all(ResidencyRow).values()
                if r.line == line
            },
            serving=self.served(),
        )


def replay(
    ledger: Queries, run: str, *, first: int = 1, last: int | None = None
) -> Iterator[tuple[Event, Replayer]]:
    """Yield each event of `run` between seq `first` and `last`, folded.

    Events of replicas count to the run that was open on their line. Call `.state()` on the
    second value before the next step: the replayer moves on.

    Raises:
        NotFound: unknown run.
    """
    row = ledger.run(run)
    replayer = Replayer(row.line)
    for event in ledger.events(line=row.line):
        if last is not None and event.seq > last:
            return
        replayer.take(event)
        if event.run == run and event.seq >= first:
            yield event, replayer


def state_at(ledger: Queries, line: str, seq: int) -> State:
    """The state of a line after event `seq`.

    Raises:
        NotFound: there is no such event.
    """
    head, _ = ledger.head()
    if not 0 <= seq <= head:
        raise NotFound(f"event {seq} does not exist, the ledger ends at {head}")
    replayer = Replayer(line)
    for event in ledger.events(line=line):
        if event.seq > seq:
            break
        replayer.take(event)
    return replayer.state()


def describe(event: Event) -> str:
    """One line for people: what happened."""
    subject = policy_name(event.line, event.version) if event.version is not None else event.run
    where = f" on {event.replica}" if event.replica else ""
    data = event.data
    detail = next(
        (
            f" ({data[name]})"
            for name in ("reason", "why", "digest", "holder", "incarnation")
            if data.get(name)
        ),
        "",
    )
    return f"{event.kind.replace('_', ' ')}: {subject}{where}{detail}"
