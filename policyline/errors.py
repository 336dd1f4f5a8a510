"""The root of every error that policyline raises on purpose, and the command's exit codes.

Each error carries what is wrong, what to do about it, and how the command ends with it. The roots
of the packages (`LedgerError`, `StorageError`, ...) are below `PolicylineError`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """How the command `policyline` ends."""

    DONE = 0
    FAILED = 1
    """A check failed, or the present state forbids it."""
    USAGE = 2
    UNREACHABLE = 3
    """Something that is needed does not answer, or cannot be read or written."""


class PolicylineError(Exception):
    """Root of policyline's errors.

    Args:
        message: what is wrong, with the value.
        hint: what to do about it, as an imperative; the error's text ends with it. Empty when
            there is nothing to do.

    Attributes:
        exit_code: of a command that ends with it.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        if hint:
            self.hint = hint


class SettingsInvalid(PolicylineError):
    """A setting that cannot work."""

    exit_code = ExitCode.USAGE


class ListenFailed(PolicylineError):
    """A server cannot listen: the address is taken or not ours."""
