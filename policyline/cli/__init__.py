"""The command `policyline`: reads flags and environment, wires the parts, maps errors to exits."""

from __future__ import annotations

from policyline.cli.app import app, main

__all__ = ["app", "main"]
