"""Judges what was measured of a storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from policyline.doctor.model import Line, failed
from policyline.doctor.storage_facts import StorageFindings

LOW_BYTES: Final = 1 << 30
"""Below it, a run of some hundred adapters of a few MB can fill the storage within a day."""
SLOW_S: Final = 1.0
"""The ledger wakes a sidecar in milliseconds; a second more is felt at every version."""


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
        yield _events(found)
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
        if found.torn:
            cause = f"{found.read} shows other bytes than were written, for {found.limit_s:g} s"
        else:
            cause = f"{found.read} does not show what was written, for {found.limit_s:g} s"
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


def _events(found: StorageFindings) -> Line:
    name = "storage.file_events"
    arrive = "arrive" if found.has_events else "do not arrive"
    return Line("note", name, f"{arrive}; none are needed, the ledger wakes the sidecars")


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
