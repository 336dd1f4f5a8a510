"""Errors of the ledger.

    LedgerError
    ├── LedgerUnavailable      database unreachable, locked for too long, full or read-only
    ├── SchemaMismatch         the database's schema is not the one this release needs
    ├── Corrupted              the chain, a row or a projection does not add up
    ├── NotFound               unknown run, version or replica
    ├── InvalidName            a line, run or replica name that cannot be used
    ├── InvalidUrl             text that names no database a ledger can live in
    ├── InvalidTime            text that is neither an event's number nor a time
    ├── ManifestInvalid        a manifest that must not be believed
    ├── Conflict               same idempotency key or version, other content
    ├── Refused                the present state forbids it (closed run, candidate moved, ...)
    └── Fenced
        ├── StaleEpoch         another process may publish now
        └── StaleGeneration    a newer watcher speaks for this replica

Each carries `hint`, the remedy as one imperative sentence; the text of the error ends with it.
"""

from __future__ import annotations

from typing import Final

from policyline.errors import ExitCode, PolicylineError

BACKUP_HINT: Final = "restore it from a backup, see docs/backup.md"
VERIFY_HINT: Final = "run: policyline ledger verify; restore a backup, see docs/backup.md"
REPAIR_HINT: Final = "run: policyline ledger verify, and if the events hold, repair-projections"


class LedgerError(PolicylineError):
    """Root of the ledger's errors."""


class LedgerUnavailable(LedgerError):
    """The database could not be reached, locked or written. Retrying later may help."""

    exit_code = ExitCode.UNREACHABLE


class SchemaMismatch(LedgerError):
    """The database's schema revision is older or newer than this release's, or absent."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, message: str, *, found: str | None, wanted: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.found = found
        self.wanted = wanted


class Corrupted(LedgerError):
    """A row, the hash chain or a projection contradicts the others.

    Args:
        seq: the first event at which it shows, if one can be named.
    """

    def __init__(self, message: str, *, seq: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.seq = seq


class NotFound(LedgerError):
    """The named run, version or replica is not in this ledger."""

    exit_code = ExitCode.USAGE


class InvalidName(LedgerError):
    """A line, run or replica name with characters that are not allowed."""

    exit_code = ExitCode.USAGE


class InvalidUrl(LedgerError):
    """Text that names no database a ledger can live in."""

    exit_code = ExitCode.USAGE


class InvalidTime(LedgerError):
    """Text that is neither an event's number nor a time."""

    exit_code = ExitCode.USAGE


class ManifestInvalid(LedgerError):
    """A manifest that is malformed, unsafe, or disagrees with its own digest."""


class Conflict(LedgerError):
    """The same key or version exists with other content."""


class Refused(LedgerError):
    """The ledger's present state does not allow this."""


class ProbeDisagrees(Refused):
    """An ack's probe differs from the first one of the same digest and engine build.

    Args:
        reference: the replica that recorded the first.
        difference: the largest between two values, natural log; infinite for another length.
    """

    def __init__(self, message: str, *, reference: str, difference: float) -> None:
        super().__init__(message)
        self.reference = reference
        self.difference = difference


class Fenced(LedgerError):
    """The caller held a claim that a newer process has replaced."""


class StaleEpoch(Fenced):
    """The run has a newer publisher.

    Args:
        holder: actor that holds the present epoch; None when it was only bumped (rollback).
        since: UTC time at which it was claimed (ISO 8601).
    """

    def __init__(self, message: str, *, holder: str | None, since: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holder = holder
        self.since = since


class StaleGeneration(Fenced):
    """A newer watcher has joined for the same replica."""
