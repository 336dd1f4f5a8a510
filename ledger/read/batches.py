"""Recorded rollouts against the events that vouch for them: each batch's hash is an event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from policyline.ledger.events import Event
from policyline.ledger.read.queries import Queries
from policyline.ledger.read.rollout_queries import RolloutTuple
from policyline.ledger.rollouts import HASHED_FIELDS, values_hash

_Name = tuple[str, str]

_LINE, _BATCH = 1, 2
_STALENESS, _FACTS = 3, 4
_VERSION = _FACTS + HASHED_FIELDS.index("version")


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the database holds of one batch: rows that follow each other."""

    name: _Name
    last_id: int
    count: int
    sha256: str
    currents: frozenset[int | str | None]
    """What was current at its moment, by the staleness of its rows."""


class BatchCheck:
    """Queries the rollouts once, in step with the events; memory grows with what is out of step."""

    def __init__(self, ledger: Queries) -> None:
        self._ledger = ledger
        self._after = 0
        self._ahead: Iterator[_Batch] = iter(())
        self._met: dict[_Name, _Batch] = {}
        """Batches that were read before their event: none, if all is well."""

    def take(self, event: Event, current: int | None) -> str | None:
        """What is wrong with the batch of the next `rollouts_recorded` event, if anything.

        Args:
            event: has the number of rollouts, and their hash.
            current: the line's current version at the event.
        """
        recorded = event.data
        found = self._find((event.line, recorded["batch"]))
        if found is None:
            return f"the rollouts of batch {recorded['batch']!r} are missing"
        if (found.count, found.sha256) != (recorded["count"], recorded["sha256"]):
            return f"rollouts of batch {recorded['batch']!r} were changed, added or removed"
        if found.currents != {current}:
            return f"rollouts of batch {recorded['batch']!r} have another staleness"
        return None

    def rest(self, last_id: int) -> Iterator[str]:
        """Batches up to the row `last_id` that no event vouches for."""
        while (batch := self._next()) is not None and batch.last_id <= last_id:
            self._met.setdefault(batch.name, batch)
        for _, name in sorted(self._met, key=str):
            yield f"no event vouches for rollouts of batch {name!r}"

    def _find(self, name: _Name) -> _Batch | None:
        if name in self._met:
            return self._met.pop(name)
        while (batch := self._next()) is not None:
            if batch.name == name:
                return batch
            self._met.setdefault(batch.name, batch)
        return None

    def _next(self) -> _Batch | None:
        """The next batch that there is by now; all of it, since a batch is written at once."""
        batch = next(self._ahead, None)
        if batch is None:
            self._ahead = self._read()
            batch = next(self._ahead, None)
        return batch

    def _read(self) -> Iterator[_Batch]:
        rows = self._ledger.rollout_tuples(after=self._after)
        for name, group in groupby(rows, key=itemgetter(_LINE, _BATCH)):
            batch = _batch(name, list(group))
            self._after = batch.last_id
            yield batch


def _batch(name: _Name, rows: list[RolloutTuple]) -> _Batch:
    try:
        sha256 = values_hash(row[_FACTS:] for row in rows)
    except (TypeError, ValueError):  # SQLite accepts a value of any type
        sha256 = ""
    return _Batch(
        name=name,
        last_id=rows[-1][0],
        count=len(rows),
        sha256=sha256,
        currents=frozenset(_current_at(row[_STALENESS], row[_VERSION]) for row in rows),
    )


def _current_at(staleness: object, version: object) -> int | str | None:
    if staleness is None:
        return None
    if isinstance(staleness, int) and isinstance(version, int):
        return staleness + version
    return "unreadable"
