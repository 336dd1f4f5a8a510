"""Errors of the demo.

DemoError              a step did not work; the text names it and its log
└── EngineMissing      the engine that was asked for is not installed

Each carries `hint`, the remedy; the text of the error ends with it.
"""

from __future__ import annotations

from policyline.errors import ExitCode, PolicylineError


class DemoError(PolicylineError):
    """Root of the demo's errors."""


class EngineMissing(DemoError):
    """The real engine was asked for and is not installed."""

    exit_code = ExitCode.UNREACHABLE
