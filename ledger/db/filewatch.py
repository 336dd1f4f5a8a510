"""Waits for changes of one file.

On Linux by inotify itself: watchfiles looks for what inotify has told it every few milliseconds,
which costs an idle process half a percent of a core and each wake-up ten milliseconds (measured).
Elsewhere by watchfiles.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import watchfiles

_STOP_STEP_S: Final = 1.0
"""How often a quiet wait looks whether it should stop."""
_WATCHFILES_STEP_MS: Final = 5

# <sys/inotify.h>
_CLOEXEC: Final = 0o2000000
_MODIFY: Final = 0x2
_ATTRIB: Final = 0x4
_CLOSE_WRITE: Final = 0x8
_EVENTS: Final = _MODIFY | _ATTRIB | _CLOSE_WRITE
_READ_BYTES: Final = 4096


def changes(file: Path, stop: threading.Event) -> Iterator[None]:
    """Block and yield once for each burst of changes, until `stop` is set.

    The file is made if it is not there, also when it is removed meanwhile.

    Raises:
        OSError: the file cannot be made, or the system has no more watches to give.
    """
    file.touch()
    if sys.platform == "linux":
        yield from _inotify(file, stop)
    else:
        yield from _watchfiles(file, stop)


def _inotify(file: Path, stop: threading.Event) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_CLOEXEC)
    _check(descriptor, file)
    try:
        _watch(libc, descriptor, file)
        yield  # what happened before the watch began is news as well
        while not stop.is_set():
            if select.select([descriptor], [], [], _STOP_STEP_S)[0]:
                os.read(descriptor, _READ_BYTES)
                _watch(libc, descriptor, file)  # nothing new, unless another file is there now
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


def _watchfiles(file: Path, stop: threading.Event) -> Iterator[None]:
    for _ in watchfiles.watch(
        file,
        watch_filter=None,
        debounce=2 * _WATCHFILES_STEP_MS,
        step=_WATCHFILES_STEP_MS,
        rust_timeout=int(_STOP_STEP_S * 1000),
        yield_on_timeout=False,
        stop_event=stop,
        raise_interrupt=False,
    ):
        yield
