"""The trainer's side: turns a saved adapter into a durable, checked version of a run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from policyline.publisher.errors import (
    BaseModelInvalid,
    CheckFailed,
    MetadataInvalid,
    PublisherClosed,
    PublisherError,
    UnknownVersion,
)

if TYPE_CHECKING:
    from policyline.publisher.model import Published
    from policyline.publisher.publisher import Publisher

__all__ = [
    "BaseModelInvalid",
    "CheckFailed",
    "MetadataInvalid",
    "Published",
    "Publisher",
    "PublisherClosed",
    "PublisherError",
    "UnknownVersion",
]


_HOMES = {"Published": "policyline.publisher.model", "Publisher": "policyline.publisher.publisher"}


def __getattr__(name: str) -> Any:
    # lazy, so that importing an error class does not load numpy
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'policyline.publisher' has no attribute {name!r}")
