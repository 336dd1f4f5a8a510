"""Wakes a thread that waits for file descriptors."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Final, Self

_BUFFER_BYTES: Final = 65536


class Waker:
    """A condition with a file descriptor, for one thread that waits in `is_readable`."""

    def __init__(self) -> None:
        self.closed = False
        """Whether the waiting thread should end."""
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.settimeout(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._reading.close()
        self._writing.close()

    def fileno(self) -> int:
        """Readable after `notify`, until `clear`."""
        return self._reading.fileno()

    def notify(self) -> None:
        """Wake the waiting thread. From any thread."""
        with contextlib.suppress(OSError):  # full: it was notified often enough; or over
            self._writing.send(b"!")

    def close(self) -> None:
        """Wake the waiting thread, to end. From any thread."""
        self.closed = True
        self.notify()

    def clear(self) -> bool:
        """Whether it was notified since it was last asked."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._reading.recv(_BUFFER_BYTES))
        return False


def is_readable(within_s: float | None, *descriptors: int) -> bool:
    """Wait until one of the descriptors can be read (or is at its end).

    Args:
        within_s: longest wait in seconds; None for no end.
        descriptors: to wait for.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if within_s is None else within_s * 1000))
