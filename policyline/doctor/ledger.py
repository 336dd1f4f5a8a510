"""Measures a ledger, and judges it; what it writes is no event and is gone when it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from policyline.doctor.model import Failure, Line, Window, failed
from policyline.ledger import Ledger
from policyline.ledger.db.connect import ledger_url
from policyline.ledger.db.schema import SCHEMA_REVISION
from policyline.ledger.errors import LedgerError, LedgerUnavailable, SchemaMismatch
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import policy_name
from policyline.ledger.roundtrip import RoundTrip, round_trip
from policyline.ledger.rows import RunRow

SIGNAL_S: Final = 5.0
"""Longest wait for a signal: local ones take milliseconds, a sidecar polls after 5 s."""
SLOW_S: Final = 0.5
"""An append takes milliseconds; publish waits for a handful of them."""


@dataclass(frozen=True, slots=True)
class LedgerFindings:
    """One ledger. None: not measured."""

    shown_url: str
    """Without its password."""
    failure: Failure | None = None
    """Why it could not be opened."""
    schema_mismatch: Failure | None = None
    is_sqlite: bool = False
    view: LineSnapshot | None = None
    round_trip: RoundTrip | Failure | None = None
    digests: Mapping[int, str] = field(default_factory=dict)
    """Version -> digest, of those that were asked about."""

    @property
    def run(self) -> RunRow | None:
        """The line's open run."""
        return None if self.view is None else self.view.run


def examine_ledger(url: str, line: str, versions: Collection[int]) -> LedgerFindings:
    """Open it, read one line, write and wait for the signal. Blocking.

    Args:
        url: of the ledger.
        line: to read.
        versions: whose digests are wanted.
    """
    try:
        parsed = ledger_url(url)
    except LedgerError as error:
        return LedgerFindings("?", failure=_failure(error))
    shown = parsed.render_as_string(hide_password=True)
    try:
        with Ledger(url) as ledger:
            return _opened(ledger, line, versions)
    except SchemaMismatch as error:
        return LedgerFindings(shown, schema_mismatch=_failure(error))
    except LedgerError as error:
        return LedgerFindings(shown, failure=_failure(error))


def _opened(ledger: Ledger, line: str, versions: Collection[int]) -> LedgerFindings:
    view = ledger.view(line, versions)
    trip: RoundTrip | Failure
    try:
        trip = round_trip(ledger, timeout_s=SIGNAL_S)
    except LedgerError as error:
        trip = _failure(error)
    known = {d.version: d.digest for d in view.desired}
    known |= {n: row.digest for n, row in view.others.items() if row.digest}
    return LedgerFindings(
        ledger.shown_url,
        is_sqlite=ledger.is_sqlite,
        view=view,
        round_trip=trip,
        digests={n: known[n] for n in versions if n in known},
    )


def _failure(error: LedgerError) -> Failure:
    return Failure(error.message, error.hint, unreachable=isinstance(error, LedgerUnavailable))


def ledger_lines(found: LedgerFindings) -> Iterator[Line]:
    """Everything about the ledger; nothing more when it cannot be opened."""
    if found.failure is not None:
        yield failed("ledger.reachable", found.failure)
        return
    yield Line("pass", "ledger.reachable", found.shown_url)
    if found.schema_mismatch is not None:
        yield failed("ledger.schema", found.schema_mismatch)
        return
    yield Line("pass", "ledger.schema", f"{SCHEMA_REVISION}, which this release needs")
    if found.round_trip is not None:
        yield from _round_trip(found, found.round_trip)
    yield from _line(found)


def _round_trip(found: LedgerFindings, trip: RoundTrip | Failure) -> Iterator[Line]:
    if isinstance(trip, Failure):
        yield failed("ledger.write", trip)
        return
    slow = trip.write_s > SLOW_S
    yield Line(
        "warn" if slow else "pass",
        "ledger.write",
        f"{1000 * trip.write_s:.1f} ms for a durable commit (a row of heartbeats, written and "
        "removed; no event)",
        "see why the database's disk or network is slow" if slow else "",
    )
    if trip.wake_s is None:
        yield Line(
            "warn",
            "ledger.signal",
            f"no signal within {SIGNAL_S:g} s: sidecars would notice at their next poll",
            "put the file on a local disk with inotify"
            if found.is_sqlite
            else "connect without a pooler in transaction mode, which drops LISTEN",
        )
    else:
        yield Line(
            "pass",
            "ledger.signal",
            f"a listener wakes {1000 * trip.wake_s:.1f} ms after the write begins",
        )


def _line(found: LedgerFindings) -> Iterator[Line]:
    view = found.view
    if view is None:
        return
    name, line = "ledger.line", view.line.line
    if view.run is None:
        yield Line("pass", name, f"{line}: no open run; the first publish opens one")
        return
    current = "nothing yet" if view.current is None else policy_name(line, view.current)
    yield Line("pass", name, f"{line}: run {view.run.run!r}, current is {current}")


def window_of(found: LedgerFindings | None, asked: int | None, default: int) -> Window:
    """The staleness to judge by: the option, else the open run's, else the default."""
    if asked is not None:
        return Window(asked, "--max-staleness")
    run = None if found is None else found.run
    if run is not None:
        return Window(run.max_staleness, f"run {run.run!r}")
    return Window(default, "the default")


def window_lines(found: LedgerFindings | None, window: Window) -> Iterator[Line]:
    """Whether the option and the open run agree."""
    run = None if found is None else found.run
    if run is not None and run.max_staleness != window.max_staleness:
        yield Line(
            "warn",
            "ledger.max_staleness",
            f"run {run.run!r} has {run.max_staleness}, {window.source} has {window.max_staleness}",
            "the run's own counts while it is open; open another run for another window",
        )
