"""The ledger: every verb that appends, and every question it answers, as one class.

A verb takes the lock, checks what it must (epoch, generation, names), appends its event, folds it
into the projections, appends whatever follows from it (readiness), and commits.
"""

from __future__ import annotations

from policyline.ledger.actor import default_actor
from policyline.ledger.append.operating import Operating
from policyline.ledger.append.publishing import Publishing
from policyline.ledger.append.serving import Serving
from policyline.ledger.claims import Claim, EngineFacts, Membership, Reservation
from policyline.ledger.read.queries import Queries

__all__ = [
    "Claim",
    "EngineFacts",
    "Ledger",
    "Membership",
    "Reservation",
    "default_actor",
]


class Ledger(Publishing, Serving, Operating, Queries):
    """A version ledger in SQLite or Postgres. Synchronous and thread-safe; daemons use threads.

    Args:
        url: `sqlite:///file.db`, a plain path, or `postgresql://user@host/name`.
        actor: who appends, as shown to auditors; default user@host:pid.
        clock: gives the time to record, UTC; it is never allowed to go back.

    Raises:
        LedgerUnavailable: the database cannot be reached.
        SchemaMismatch: it has another schema; run `policyline ledger upgrade`.
    """
