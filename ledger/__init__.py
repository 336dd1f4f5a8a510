"""The version ledger: which weights every name meant, who could serve it when.

from policyline.ledger import Ledger, verify

with Ledger("run.db") as ledger:
print(verify(ledger).ok)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyline.ledger.claims import Claim, EngineFacts, Membership, Reservation
    from policyline.ledger.db.migrate import create_if_missing, upgrade_url
    from policyline.ledger.read.as_of import as_of
    from policyline.ledger.read.audit import audit
    from policyline.ledger.read.replay import replay
    from policyline.ledger.read.verify import verify
    from policyline.ledger.settings import RunSettings
    from policyline.ledger.store import Ledger

__all__ = [
    "Claim",
    "EngineFacts",
    "Ledger",
    "Membership",
    "Reservation",
    "RunSettings",
    "as_of",
    "audit",
    "create_if_missing",
    "replay",
    "upgrade_url",
    "verify",
]

_MODULES = {
    "Claim": "claims",
    "EngineFacts": "claims",
    "Ledger": "store",
    "Membership": "claims",
    "Reservation": "claims",
    "RunSettings": "settings",
    "as_of": "read.as_of",
    "audit": "read.audit",
    "create_if_missing": "db.migrate",
    "replay": "read.replay",
    "upgrade_url": "db.migrate",
    "verify": "read.verify",
}


def __getattr__(name: str) -> Any:
    # lazy, so that the pure manifest can be imported without a database library
    if name not in _MODULES:
        raise AttributeError(f"module 'policyline.ledger' has no attribute {name!r}")
    return getattr(importlib.import_module(f"policyline.ledger.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
