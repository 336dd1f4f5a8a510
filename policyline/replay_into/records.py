"""Reads a run's versions from the ledger, and how each answered its probe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from policyline.ledger import Ledger
from policyline.ledger.events import VERSION_ACKED, VERSION_LOAD_FAILED
from policyline.ledger.names import policy_name
from policyline.ledger.rows import RunRow, VersionRow
from policyline.replay_into.errors import NothingToReplay
from policyline.replay_into.model import Recorded


@dataclass(frozen=True, slots=True)
class Range:
    """Version numbers, both ends included; None is open."""

    first: int | None = None
    last: int | None = None

    def holds(self, version: int) -> bool:
        """Whether a version is in it."""
        return (self.first or 0) <= version and (self.last is None or version <= self.last)

    def __str__(self) -> str:
        return f"{self.first or ''}..{self.last or ''}"


def parse_range(text: str) -> Range | None:
    """Read `3..7`, `3..`, `..7` or `5`; None for anything else."""
    found = re.fullmatch(r"v?(\d*)\.\.v?(\d*)", text)
    if found is not None and any(found.groups()):
        first, last = (int(number) if number else None for number in found.groups())
        wrong = first is not None and last is not None and first > last
        return None if wrong else Range(first, last)
    single = re.fullmatch(r"v?(\d+)", text)
    return None if single is None else Range(int(single[1]), int(single[1]))


def published_versions(ledger: Ledger, run: RunRow, wanted: Range) -> list[VersionRow]:
    """The published versions of a run by number, whatever their state is now.

    Raises:
        NothingToReplay: none in the range.
    """
    rows = [r for r in ledger.versions(run=run.run) if r.digest is not None]
    chosen = [r for r in rows if wanted.holds(r.version)]
    if not chosen:
        published = f"{rows[0].version}..{rows[-1].version}" if rows else "none"
        raise NothingToReplay(
            f"run {run.run!r} has no published version in {wanted} (published: {published})",
            hint="run: policyline ledger versions",
        )
    return chosen


def recorded_probes(ledger: Ledger, row: VersionRow) -> list[Recorded]:
    """Every probe that was acked for a version's digest, in the order of the acks."""
    events = ledger.events(line=row.line, version=row.version, kinds=(VERSION_ACKED,))
    return [
        Recorded(event.replica or "?", event.data["build"], event.data["probe"])
        for event in events
        if event.data["digest"] == row.digest
    ]


def was_refused(ledger: Ledger, row: VersionRow) -> str | None:
    """Why a replica refused a version for good; None if none did, or any acked it."""
    kinds = (VERSION_ACKED, VERSION_LOAD_FAILED)
    reason = None
    for event in ledger.events(line=row.line, version=row.version, kinds=kinds):
        if event.kind == VERSION_ACKED:
            return None
        if event.data["permanent"]:
            reason = str(event.data["reason"])
    return reason


def name_of(row: VersionRow) -> str:
    """The policy name that a version is served under."""
    return policy_name(row.line, row.version)
