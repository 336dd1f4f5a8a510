"""The trainer's side: turns a saved adapter into a durable, checked version of a run."""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    # lazy, so that whoever only tells errors apart does not load numpy
    if name in {"Published", "Publisher"}:
        from publisher import publisher  # noqa: PLC0415 - see above

        return getattr(publisher, name)
    raise AttributeError(f"module 'publisher' has no attribute {name!r}")
