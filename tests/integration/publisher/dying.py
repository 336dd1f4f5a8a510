"""A publisher that is killed (SIGKILL) just before its k-th effect on the world.

An effect is a call of the operating system or of SQLite that changes something. They are counted
by the interpreter's own profiling hook, so the code under test is the one that runs in production.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from policyline.ledger import Ledger
from policyline.publisher import Publisher
from tests.integration.publisher.workspace import RUN, Workspace

EFFECTS = frozenset({"write", "fsync", "mkdir", "rename", "rmdir", "unlink"})
SQL_EFFECTS = frozenset({"execute", "commit"})
DONE = "done"
"""A file that the child makes once `publish` has returned."""


def publish_dying(workspace: Workspace, kill_before: int) -> None:
    """Open and publish once, in a process of its own; dies before effect `kill_before` (from 1)."""
    with Ledger(workspace.ledger) as ledger:
        sys.setprofile(_counter(kill_before))
        publisher = Publisher(ledger, workspace.storage, run=RUN)
        publisher.publish(workspace.adapter)
        sys.setprofile(None)
        workspace.root.with_name(DONE).touch()
        os.kill(os.getpid(), signal.SIGKILL)  # without giving the epoch back


def open_dying(workspace: Workspace, kill_before: int) -> None:
    """Open only, so sweep, and die before effect `kill_before`."""
    with Ledger(workspace.ledger) as ledger:
        sys.setprofile(_counter(kill_before))
        Publisher(ledger, workspace.storage, run=RUN)
        sys.setprofile(None)
        workspace.root.with_name(DONE).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _counter(kill_before: int) -> Callable[[FrameType, str, Any], None]:
    left = kill_before

    def hook(_frame: FrameType, event: str, called: Any) -> None:
        nonlocal left
        if event != "c_call" or not _is_effect(called):
            return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _is_effect(called: Any) -> bool:
    if called.__module__ == "posix":
        return called.__name__ in EFFECTS
    owner = type(getattr(called, "__self__", None)).__module__
    return owner == "sqlite3" and called.__name__ in SQL_EFFECTS
