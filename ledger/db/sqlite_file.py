"""SQLite's file: a local file system, and the same file for as long as it is open."""

from __future__ import annotations

from pathlib import Path

from policyline.ledger.errors import LedgerUnavailable

MOUNTS = Path("/proc/self/mountinfo")
NETWORK_TYPES = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "smb3",
    "smbfs",
}
"""Types whose locks are not shared between machines, or whose shared memory is not: SQLite's own
advice (sqlite.org/wal.html, "WAL does not work over a network filesystem"). `fuse` stands for all
`fuse.*`, which bucket mounts are; `fuseblk` is a local disk."""


def network_type(path: Path) -> str | None:
    """The type of the network file system that `path` is on, or None for a local one.

    None also where the system has no /proc: there nothing is refused.
    """
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = type_in(mounts, path.resolve())
    known = found is not None and (found in NETWORK_TYPES or found.startswith("fuse."))
    return found if known else None


def type_in(mountinfo: str, path: Path) -> str | None:
    """The type of the mount that holds `path`, by proc(5): the longest mount point wins."""
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        parts = fields.split()
        if len(parts) < 5 or not rest:
            continue
        point = Path(parts[4].encode().decode("unicode_escape"))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), rest.split()[0])
    return None if best is None else best[1]


class OpenedFile:
    """The file that a path names now.

    A process that has it open can read and write it even after it was deleted, without an error:
    what it appends is then lost.

    Args:
        path: of a file that is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = _identity(path)

    def check(self) -> None:
        """Check that the path still names it.

        Raises:
            LedgerUnavailable: it does not.
        """
        found = _identity(self._path)
        if found == self._identity:
            return
        what = "was removed" if found is None else "was replaced by another file"
        raise LedgerUnavailable(
            f"ledger {self._path} {what} while this process had it open",
            hint="move the file back with its -wal and -shm, and it goes on; after a restore from "
            "a backup restart what uses it",
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
