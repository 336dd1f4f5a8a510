"""The trainer's side: turns a saved adapter into a durable, checked version of a run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from publisher.errors import (
    BaseModelInvalid,
    CheckFailed,
    MetadataInvalid,
    PublisherClosed,
    PublisherError,
    UnknownVersion,
)

if TYPE_CHECKING:
    from publisher.model import Published
    from publisher.publisher import Publisher

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


_HOMES = {"Published": "publisher.model", "Publisher": "publisher.publisher"}


def __getattr__(name: str) -> Any:
    # lazy, so that whoever only tells errors apart does not load numpy
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'publisher' has no attribute {name!r}")
