"""Judges what was measured of a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from policyline.doctor.ledger_facts import SIGNAL_S, LedgerFindings
from policyline.doctor.model import Failure, Line, Window, failed
from policyline.ledger.names import policy_name
from policyline.ledger.roundtrip import RoundTrip

SLOW_S: Final = 0.5
"""An append takes milliseconds; publish waits for a handful of them."""


def ledger_lines(found: LedgerFindings) -> Iterator[Line]:
    """Everything about the ledger; nothing more when it cannot be opened."""
    if found.failure is not None:
        yield failed("ledger.reachable", found.failure)
        return
    yield Line("pass", "ledger.reachable", found.shown_url)
    if found.schema_mismatch is not None:
        yield failed("ledger.schema", found.schema_mismatch)
        return
    yield Line("pass", "ledger.schema", f"{found.schema}, which this release needs")
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
    if found is not None and found.view is not None and found.view.run is not None:
        run = found.view.run
        return Window(run.max_staleness, f"run {run.run!r}")
    return Window(default, "the default")


def window_lines(found: LedgerFindings | None, window: Window) -> Iterator[Line]:
    """Whether the option and the open run agree."""
    if found is None or found.view is None or found.view.run is None:
        return
    run = found.view.run
    if run.max_staleness != window.max_staleness:
        yield Line(
            "warn",
            "ledger.max_staleness",
            f"run {run.run!r} has {run.max_staleness}, {window.source} has {window.max_staleness}",
            "the run's own counts while it is open; open another run for another window",
        )
