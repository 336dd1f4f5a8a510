"""Measures a ledger; what it writes is no event and is gone when it returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from policyline.doctor.model import Failure
from policyline.ledger import Ledger
from policyline.ledger.db.connect import ledger_url
from policyline.ledger.db.schema import SCHEMA_REVISION
from policyline.ledger.errors import LedgerError, LedgerUnavailable, SchemaMismatch
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.roundtrip import RoundTrip, round_trip

SIGNAL_S: Final = 5.0
"""Longest wait for a signal: local ones take milliseconds, a sidecar polls after 5 s."""


@dataclass(frozen=True, slots=True)
class LedgerFindings:
    """One ledger. None: not measured."""

    shown_url: str
    """Without its password."""
    failure: Failure | None = None
    """Why it could not be opened."""
    schema: str | None = None
    schema_mismatch: Failure | None = None
    is_sqlite: bool = False
    ledger_id: str | None = None
    view: LineSnapshot | None = None
    round_trip: RoundTrip | Failure | None = None
    digests: Mapping[int, str] = field(default_factory=dict)
    """Version -> digest, of those that were asked about."""


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
        schema=SCHEMA_REVISION,
        is_sqlite=ledger.is_sqlite,
        ledger_id=ledger.ledger_id,
        view=view,
        round_trip=trip,
        digests={n: known[n] for n in versions if n in known},
    )


def _failure(error: LedgerError) -> Failure:
    return Failure(error.message, error.hint, unreachable=isinstance(error, LedgerUnavailable))
