"""SQLite belongs on a local disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db import sqlite_file
from policyline.ledger.db.migrate import create_if_missing, upgrade_url
from policyline.ledger.db.sqlite_file import network_type, type_in
from policyline.ledger.errors import LedgerUnavailable

MOUNTINFO = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:5 / /mnt/bucket rw - fuse.hf-mount hf rw
31 22 0:6 / /mnt/share rw,relatime shared:3 master:1 - nfs4 server:/x rw
32 31 8:2 / /mnt/share/local rw - xfs /dev/sdb rw
33 22 0:7 / /mnt/with\040space rw - cifs //server/x rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/x/run.db", "ext4"),
        ("/mnt/bucket/run.db", "fuse.hf-mount"),
        ("/mnt/bucketful/run.db", "ext4"),
        ("/mnt/share/a/b/run.db", "nfs4"),
        ("/mnt/share/local/run.db", "xfs"),
        ("/mnt/with space/run.db", "cifs"),
    ],
)
def test_the_longest_mount_point_tells_the_type(path: str, expected: str) -> None:
    assert type_in(MOUNTINFO, Path(path)) == expected


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("nfs4", True), ("fuse.sshfs", True), ("9p", True), ("fuseblk", False), ("ext4", False)],
)
def test_network_types_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 0:1 / / rw - {kind} x rw\n")
    monkeypatch.setattr(sqlite_file, "MOUNTS", mounts)
    assert network_type(tmp_path) == (kind if refused else None)


def test_a_system_without_proc_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "MOUNTS", tmp_path / "missing")
    assert network_type(tmp_path) is None


def test_sqlite_on_a_network_file_system_is_refused_with_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 0 0:1 / / rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(sqlite_file, "MOUNTS", mounts)
    path = str(tmp_path / "run.db")
    with pytest.raises(LedgerUnavailable, match=r"nfs4.*postgresql://.*local disk"):
        upgrade_url(path)
    with pytest.raises(LedgerUnavailable, match="network"):
        create_if_missing(path)
    with pytest.raises(LedgerUnavailable, match="network"):
        Ledger(path)
    assert not Path(path).exists()
