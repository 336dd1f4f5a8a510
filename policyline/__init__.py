"""Moves LoRA policy versions from one RL trainer to a fleet of vLLM servers.

    from policyline import Ledger, Publisher, open_storage

What is named here is the public API; everything is imported at its first use, so that
`import policyline` loads neither a database library nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyline.ledger import Ledger, RunSettings
    from policyline.publisher import Publisher
    from policyline.publisher.callback import PublishCallback
    from policyline.publisher.settings import PublishTo
    from policyline.storage import open_storage

__all__ = [
    "Ledger",
    "PublishCallback",
    "PublishTo",
    "Publisher",
    "RunSettings",
    "open_storage",
]

_MODULES = {
    "Ledger": "policyline.ledger",
    "PublishCallback": "policyline.publisher.callback",
    "PublishTo": "policyline.publisher.settings",
    "Publisher": "policyline.publisher",
    "RunSettings": "policyline.ledger",
    "open_storage": "policyline.storage",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'policyline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
