"""The trainer's side: turns a saved adapter into a durable, checked version of a run."""

from __future__ import annotations

from publisher.errors import (
    BaseModelInvalid,
    CheckFailed,
    MetadataInvalid,
    PublisherClosed,
    PublisherError,
    UnknownVersion,
)
from publisher.publisher import Published, Publisher

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
