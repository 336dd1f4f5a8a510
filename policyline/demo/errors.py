"""Errors of the demo.

DemoError              a step did not work; the text says which and where its log is
└── EngineMissing      the engine that was asked for is not installed

Each carries `hint`, the remedy; the text of the error ends with it.
"""

from __future__ import annotations


class DemoError(Exception):
    """Root of the demo's errors.

    Args:
        message: what is wrong, with the value.
        hint: what to do about it; empty when there is nothing to do.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.hint = hint


class EngineMissing(DemoError):
    """The real engine was asked for and is not installed."""
