"""Waits for changes of one file.

On Linux by inotify itself: watchfiles asks every few milliseconds what inotify has reported, which
costs an idle process half a percent of a core and each wake-up ten milliseconds (measured).
Elsewhere by watchfiles.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import watchfiles

from policyline.ledger.db.waker import Waker, is_readable

_WATCHFILES_STEP_MS: Final = 5
_WATCHFILES_CHECK_MS: Final = 1000
"""How often a quiet wait of watchfiles checks its waker."""

# <sys/inotify.h>
_CLOEXEC: Final = 0o2000000
_MODIFY: Final = 0x2
_ATTRIB: Final = 0x4
_CLOSE_WRITE: Final = 0x8
_EVENTS: Final = _MODIFY | _ATTRIB | _CLOSE_WRITE
_READ_BYTES: Final = 4096


def changes(file: Path, waker: Waker, timeout_s: float | None = None) -> Iterator[None]:
    """Block and yield once at the start, after each burst of changes and each notification.

    The file is made if it is not there, also when it is removed meanwhile.

    Args:
        file: to watch.
        waker: wakes the wait, and ends it when it is closed.
        timeout_s: yield also when nothing happened for so many seconds; None for never.

    Raises:
        OSError: the file cannot be made, or the system has no more watches to give.
    """
    file.touch()
    if sys.platform == "linux":
        yield from _inotify(file, waker, timeout_s)
    else:
        yield from _watchfiles(file, waker, timeout_s)


def _inotify(file: Path, waker: Waker, timeout_s: float | None) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_CLOEXEC)
    _check(descriptor, file)
    try:
        _watch(libc, descriptor, file)
        yield  # something may have happened before the watch began
        while not waker.closed:
            is_readable(timeout_s, descriptor, waker.fileno())
            if is_readable(0, descriptor):
                os.read(descriptor, _READ_BYTES)
                _watch(libc, descriptor, file)  # no change, unless another file is there now
            waker.clear()
            if not waker.closed:
                yield
    finally:
        os.close(descriptor)


def _watch(libc: ctypes.CDLL, descriptor: int, file: Path) -> None:
    if not file.exists():
        file.touch()
    _check(libc.inotify_add_watch(descriptor, os.fsencode(file), _EVENTS), file)


def _check(result: int, file: Path) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(file))


def _watchfiles(file: Path, waker: Waker, timeout_s: float | None) -> Iterator[None]:
    yielded_s = time.monotonic()
    for changed in watchfiles.watch(
        file,
        watch_filter=None,
        debounce=2 * _WATCHFILES_STEP_MS,
        step=_WATCHFILES_STEP_MS,
        rust_timeout=_WATCHFILES_CHECK_MS,
        yield_on_timeout=True,
        raise_interrupt=False,
    ):
        notified = waker.clear()
        if waker.closed:
            return
        is_due = timeout_s is not None and time.monotonic() - yielded_s >= timeout_s
        if changed or notified or is_due:
            yield
            yielded_s = time.monotonic()
