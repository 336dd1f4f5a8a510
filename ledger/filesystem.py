"""Which file system a path is on: SQLite's locks and shared memory need a local one."""

from __future__ import annotations

from pathlib import Path

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

    None also where the system does not tell (no /proc): there nothing is refused.
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
