"""Measures a storage directory, and what a second view shows of what is written to the first.

Everything is written below the storage's root under hidden names of one attempt, which neither
publisher nor watcher reads, and removed again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import watchfiles

from policyline.doctor.model import Failure, Line, failed
from policyline.storage import DirectoryStorage, StorageError, StorageUnavailable, open_storage

PREFIX: Final = ".policyline-doctor-"
EVENTS_S: Final = 2.0
"""How long file events are waited for: a local file system sends them in milliseconds."""
LOW_BYTES: Final = 1 << 30
"""Below it, a run of some hundred adapters of a few MB can fill the storage within a day."""
SLOW_S: Final = 1.0
"""The ledger wakes a sidecar in milliseconds; a second more is felt at every version."""
_PAYLOAD_BYTES: Final = 1 << 20
_PAUSES_S: Final = (0.001, 0.05)
"""First and longest pause between two reads."""
_REFUSED: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class StorageFindings:
    """One storage. None: not measured, or not within the limit where a time is meant."""

    written: str
    """Where was written."""
    read: str
    """Where was read; the same where no second view was given."""
    limit_s: float
    """Longest wait of one measurement."""
    failure: Failure | None = None
    """Why nothing was measured."""
    measurable: bool = True
    """Whether it is a directory; of others only that they can be written is seen."""
    free_bytes: int | None = None
    written_s: float | None = None
    """From the end of a write, fsync included, to its whole content on the reader's side."""
    torn: int = 0
    """How often the reader's side showed other bytes before."""
    renamed_s: float | None = None
    """From a directory's rename to its file's content on the reader's side."""
    missing_s: float | None = None
    """The same for a name that was read before it was there."""
    has_events: bool | None = None
    """Whether a write caused a file event on the reader's side."""
    reader_writable: bool | None = None
    """None where there is no second view, or for the reason in `reader_unknown`."""
    reader_unknown: str = ""
    left: str = ""
    """What could not be removed."""

    @property
    def has_two_views(self) -> bool:
        """Whether the reader's side was given."""
        return self.written != self.read


def examine_storage(
    url: str, reader: Path | None, *, timeout_s: float, stop: threading.Event
) -> StorageFindings:
    """Write through one view, read through the other.

    Blocking, and for ever where a mount is dead: call it from a thread that nobody waits for.

    Args:
        url: of the storage, as the publisher has it.
        reader: the same as a sidecar sees it; None for one view.
        timeout_s: longest wait of one measurement.
        stop: ends every wait, so that what was written is removed at once.
    """
    found = StorageFindings(url, url if reader is None else str(reader), timeout_s)
    try:
        opened = open_storage(url)
        opened.check_writable()
    except StorageError as error:
        dead = isinstance(error, StorageUnavailable)
        return replace(found, failure=Failure(error.message, error.hint, unreachable=dead))
    if not isinstance(opened, DirectoryStorage):
        return replace(found, measurable=False)
    read = opened.root if reader is None else reader
    if not read.is_dir():
        gone = Failure(f"{read} is no directory", "mount the storage there", unreachable=True)
        return replace(found, failure=gone)
    return _Probe(opened.root, read, timeout_s, stop).run()


class _Probe:
    """One attempt with names of its own."""

    def __init__(self, written: Path, read: Path, timeout_s: float, stop: threading.Event) -> None:
        self._written = written
        self._read = read
        self._timeout_s = timeout_s
        self._stop = stop
        self._stem = f"{PREFIX}{uuid.uuid4().hex[:12]}"
        self._content = secrets.token_bytes(_PAYLOAD_BYTES)
        self._torn = 0

    def run(self) -> StorageFindings:
        """Measure, and remove what was written."""
        found = StorageFindings(str(self._written), str(self._read), self._timeout_s)
        try:
            found = self._measure(found)
        except OSError as error:
            cause = Failure(f"{self._written}: {error.strerror}", unreachable=True)
            found = replace(found, failure=cause)
        finally:
            left = self._clean()
        return replace(found, left=left)

    def _measure(self, found: StorageFindings) -> StorageFindings:
        usage = shutil.disk_usage(self._written)
        written_s = self._write("write")
        if written_s is None:
            return replace(found, free_bytes=usage.free)
        writable, unknown = self._try_to_write()
        return replace(
            found,
            free_bytes=usage.free if usage.total else None,
            written_s=written_s,
            renamed_s=self._write("rename", rename=True),
            missing_s=self._write("early", rename=True, read_first=True),
            has_events=self._events(),
            reader_writable=writable,
            reader_unknown=unknown,
            torn=self._torn,
        )

    def _write(self, what: str, *, rename: bool = False, read_first: bool = False) -> float | None:
        """Seconds until the reader's side shows it, from the write's or the rename's end."""
        final = self._written / f"{self._stem}-{what}"
        directory = final.with_name(f"{final.name}-staged") if rename else final
        directory.mkdir()
        with (directory / "bytes").open("xb") as file:
            file.write(self._content)
            file.flush()
            os.fsync(file.fileno())
        if read_first:
            self._sees(what)
        if rename:
            directory.rename(final)
        return self._until(lambda: self._sees(what))

    def _until(self, condition: Callable[[], bool]) -> float | None:
        """Seconds until it holds, checked ever more slowly; None when it does not in time."""
        started = time.perf_counter()
        pause_s, longest_s = _PAUSES_S
        while not condition():
            waited_s = time.perf_counter() - started
            if waited_s >= self._timeout_s or self._stop.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, longest_s)
        return time.perf_counter() - started

    def _sees(self, what: str) -> bool:
        """Whether the reader's side shows the right bytes; other bytes are counted."""
        try:
            content = (self._read / f"{self._stem}-{what}" / "bytes").read_bytes()
        except OSError:
            return False
        right = content == self._content
        self._torn += not right
        return right

    def _events(self) -> bool:
        """Write again and again until the reader's side gets an event.

        Again, because nothing shows when a watch has begun.
        """
        here = f"{self._stem}-events"
        (self._written / here).mkdir()
        event, stop = threading.Event(), threading.Event()
        if self._until((self._read / here).is_dir) is None:
            return False
        watcher = threading.Thread(
            target=_wait_for_event, args=(self._read / here, event, stop), daemon=True
        )
        watcher.start()
        deadline = time.monotonic() + EVENTS_S
        number = 0
        try:
            while not event.wait(0.1) and time.monotonic() < deadline:
                (self._written / here / str(number)).touch()
                number += 1
        finally:
            stop.set()
        return event.is_set()

    def _try_to_write(self) -> tuple[bool | None, str]:
        """Whether the reader's side can be written, and why that is not known."""
        if self._written.resolve() == self._read.resolve():
            return None, f"it is the same directory as {self._written}"
        path = self._read / f"{self._stem}-written-by-reader"
        try:
            path.touch(exist_ok=False)
        except OSError as error:
            if error.errno in _REFUSED:
                return False, ""
            return None, f"a write to it failed: {error.strerror}"
        path.unlink()
        return True, ""

    def _clean(self) -> str:
        left = []
        for path in self._written.glob(f"{self._stem}*"):
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                left.append(str(path))
        return ", ".join(left)


def _wait_for_event(directory: Path, event: threading.Event, stop: threading.Event) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # no watches left, or none on such a mount
        for _ in watchfiles.watch(
            directory,
            watch_filter=None,
            debounce=10,
            step=5,
            rust_timeout=200,
            stop_event=stop,
            raise_interrupt=False,
            force_polling=False,
        ):
            event.set()
            return


def storage_lines(found: StorageFindings) -> Iterator[Line]:
    """Everything about the storage; nothing more when it cannot be written."""
    if found.failure is not None:
        yield failed("storage.reachable", found.failure)
        return
    where = f"{found.written} -> {found.read}" if found.has_two_views else found.written
    yield Line("pass", "storage.reachable", where)
    if not found.measurable:
        yield Line("skip", "storage.read_after_write", "only directories are measured")
        return
    yield from _free(found)
    yield _same_bytes(found)
    if found.written_s is not None:
        yield _rename(found)
        yield _early(found)
        arrive = "arrive" if found.has_events else "do not arrive"
        yield Line(
            "note",
            "storage.file_events",
            f"{arrive}; none are needed, the ledger wakes the sidecars",
        )
        yield from _read_only(found)
    if found.left:
        yield Line("warn", "storage.left", found.left, "remove it by hand")


def _free(found: StorageFindings) -> Iterator[Line]:
    if found.free_bytes is None:
        return
    value = f"{found.free_bytes / 1e9:.1f} GB free"
    if found.free_bytes < LOW_BYTES:
        yield Line(
            "warn", "storage.space", value, "free space, or let policyline collect old versions"
        )
    else:
        yield Line("pass", "storage.space", value)


def _same_bytes(found: StorageFindings) -> Line:
    name = "storage.read_after_write"
    if found.written_s is None:
        seen = "shows other bytes than were" if found.torn else "does not show what was"
        cause = f"{found.read} {seen} written, for {found.limit_s:g} s"
        remedy = "make sure that both are the same storage, and that the mount is alive"
        return Line("fail", name, cause, remedy)
    value = f"the same bytes after {_ms(found.written_s)}"
    if found.torn:
        value += f"; incomplete ones were seen {found.torn} times before (a sidecar checks)"
    return _timed(name, value, found.written_s)


def _rename(found: StorageFindings) -> Line:
    name = "storage.rename"
    if found.renamed_s is None:
        return Line(
            "fail",
            name,
            f"a renamed directory was not seen within {found.limit_s:g} s",
            "use a mount that shows renames, or a lower directory cache time",
        )
    return _timed(name, f"seen after {_ms(found.renamed_s)}", found.renamed_s)


def _early(found: StorageFindings) -> Line:
    """A mount that was asked too early may go on saying "missing"."""
    name = "storage.missing_remembered"
    remedy = (
        "lower the mount's negative and directory cache times; policyline itself never reads a "
        "name before it is in the ledger"
    )
    if found.missing_s is None:
        value = f"a name read too early stays missing for more than {found.limit_s:g} s"
        return Line("warn", name, value, remedy)
    value = f"a name read too early is seen {_ms(found.missing_s)} after it is there"
    if found.missing_s > SLOW_S:
        return Line("warn", name, value, remedy)
    return Line("pass", name, value)


def _read_only(found: StorageFindings) -> Iterator[Line]:
    if not found.has_two_views:
        return
    name = "storage.sidecar_read_only"
    if found.reader_writable is False:
        yield Line("pass", name, f"{found.read} cannot be written")
    elif found.reader_writable:
        yield Line(
            "warn",
            name,
            f"{found.read} can be written by this user",
            "mount it read-only for sidecars: they only read",
        )
    else:
        yield Line(
            "skip",
            name,
            f"{found.read}: {found.reader_unknown}",
            "give --sidecar-storage the mount that the sidecar reads, in working order",
        )


def _timed(name: str, value: str, seconds: float) -> Line:
    if seconds > SLOW_S:
        return Line("warn", name, value, "every version waits so long: lower the mount's caching")
    return Line("pass", name, value)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
