"""Canonical JSON: the same value is always the same text, so that texts can be hashed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final


def canonical(value: Mapping[str, Any] | list[Any]) -> str:
    """Serialise with sorted keys, no white space, no NaN.

    Raises:
        ValueError: NaN or infinity.
        TypeError: a value that JSON cannot hold.
    """
    return _ENCODER.encode(value)


_ENCODER: Final = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def storable(value: Any) -> Any:
    """`value` with texts that every database can store.

    Texts from engines and clients can hold what JSON can and a database cannot: U+0000 (Postgres)
    and halves of surrogate pairs (no UTF-8). They become U+FFFD, so that no request can
    prevent an event from being recorded.
    """
    if isinstance(value, str):
        return value if value.isascii() and "\0" not in value else _mended(value)
    if isinstance(value, Mapping):
        return {storable(name): storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return value


def _mended(text: str) -> str:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "\ufffd")


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: not JSON, or not an object.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one error for the caller to catch
    return value
