"""Errors become one line on stderr and an exit code.

0 done    1 a check failed or the ledger refused    2 usage    3 something unreachable
"""

from __future__ import annotations

import errno
import sys
from typing import Final

import typer

from policyline.cli.output import visible
from policyline.demo.errors import DemoError, EngineMissing
from policyline.doctor.model import Unanswered, Unreadable
from policyline.ledger.errors import (
    InvalidName,
    InvalidTime,
    InvalidUrl,
    LedgerError,
    LedgerUnavailable,
    NotFound,
    SchemaMismatch,
)
from policyline.publisher.errors import BaseModelInvalid, PublisherError
from policyline.replay_into.errors import NothingToReplay, ReplayError, ServerGone, StateInvalid
from policyline.router.errors import ListenFailed, RouterError, SpoolUnusable
from policyline.router.errors import SettingsInvalid as RouterSettingsInvalid
from policyline.storage.errors import (
    SchemeUnsupported,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StorageUnwritable,
)
from policyline.watcher.errors import CacheUnusable, SidecarSettingsInvalid, WatcherError

CHECK_FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3

EXIT_CODES: Final[dict[type[Exception], int]] = {
    LedgerUnavailable: UNREACHABLE,
    SchemaMismatch: UNREACHABLE,
    NotFound: USAGE,
    InvalidName: USAGE,
    InvalidTime: USAGE,
    InvalidUrl: USAGE,
    LedgerError: CHECK_FAILED,
    SchemeUnsupported: USAGE,
    StorageUnavailable: UNREACHABLE,
    StorageUnwritable: UNREACHABLE,
    StorageFull: UNREACHABLE,
    StorageError: CHECK_FAILED,
    BaseModelInvalid: USAGE,
    PublisherError: CHECK_FAILED,
    Unanswered: UNREACHABLE,
    Unreadable: CHECK_FAILED,
    CacheUnusable: UNREACHABLE,
    SidecarSettingsInvalid: USAGE,
    WatcherError: CHECK_FAILED,
    RouterSettingsInvalid: USAGE,
    SpoolUnusable: UNREACHABLE,
    ListenFailed: CHECK_FAILED,
    RouterError: CHECK_FAILED,
    EngineMissing: UNREACHABLE,
    DemoError: CHECK_FAILED,
    NothingToReplay: USAGE,
    StateInvalid: USAGE,
    ServerGone: UNREACHABLE,
    ReplayError: CHECK_FAILED,
}
"""The most specific class counts. Every package's root error is here, so an operator never sees a
traceback for a condition that policyline knows."""


def exit_code(error: Exception) -> int | None:
    """The exit code of a known error; None for one that is a bug."""
    for kind in type(error).__mro__:
        if kind in EXIT_CODES:
            return EXIT_CODES[kind]
    return None


def run_reporting(app: typer.Typer) -> int:
    """Run the command line; return the exit code, with the error told in one line."""
    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except Exception as error:
        code = exit_code(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            code = UNREACHABLE
        if code is None:
            raise
        text = " ".join(str(error).split())
        sys.stderr.write(f"policyline: {visible(text)}\n")
        return code
    return 0
