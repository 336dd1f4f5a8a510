"""Canonical JSON: the same value is always the same text, so that texts can be hashed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def canonical(value: Mapping[str, Any] | list[Any]) -> str:
    """Serialise with sorted keys, no white space, no NaN.

    Raises:
        ValueError: NaN or infinity.
        TypeError: a value that JSON cannot hold.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: not JSON, or not an object.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one error for the caller to catch
    return value
