"""Texts of clients in messages. Pure."""

from __future__ import annotations

from typing import Final

_SHOWN_MOST: Final = 200


def cut(value: object) -> str:
    """A client's value as an error shows it: its `repr`, of a long one the first 200 characters."""
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_MOST else f"{shown[:_SHOWN_MOST]}..."
