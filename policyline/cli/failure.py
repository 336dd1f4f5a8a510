"""Errors become one line on stderr and an exit code: `policyline.errors.ExitCode`."""

from __future__ import annotations

import errno
import sys

import typer

from policyline.cli.output import visible
from policyline.errors import ExitCode, PolicylineError


def run_reporting(app: typer.Typer) -> int:
    """Run the command line; return the exit code, with a known error as one line on stderr."""
    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.DONE
    except PolicylineError as error:
        return _report(error, error.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _report(error, ExitCode.UNREACHABLE)
    return ExitCode.DONE


def _report(error: Exception, code: ExitCode) -> ExitCode:
    text = " ".join(str(error).split())
    sys.stderr.write(f"policyline: {visible(text)}\n")
    return code
