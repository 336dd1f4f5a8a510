"""The version ledger: which weights every name meant, who could serve it when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyline.ledger.settings import RunSettings
    from policyline.ledger.store import Claim, EngineFacts, Ledger, Membership, Reservation

__all__ = ["Claim", "EngineFacts", "Ledger", "Membership", "Reservation", "RunSettings"]


def __getattr__(name: str) -> Any:
    # lazy, so that the pure manifest can be imported without a database library
    if name == "RunSettings":
        from policyline.ledger import settings  # noqa: PLC0415 - see above

        return settings.RunSettings
    if name in __all__:
        from policyline.ledger import store  # noqa: PLC0415 - see above

        return getattr(store, name)
    raise AttributeError(f"module 'policyline.ledger' has no attribute {name!r}")
