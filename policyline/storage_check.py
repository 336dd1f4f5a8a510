"""Checks that the storage holds what the ledger says: `ledger verify --storage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policyline.ledger import Ledger
from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import MANIFEST_NAME, Manifest
from policyline.ledger.names import parse_policy_name, policy_name
from policyline.ledger.read.verify import Problem
from policyline.ledger.rows import VersionRow
from policyline.publisher.sweep import MAX_MANIFEST_BYTES
from policyline.storage.errors import ContentMismatch, FileMissing, UnsafePath
from policyline.storage.interface import Storage

_SHOWN = 3
"""Surplus files that are named."""
_OLDER_THAN_STORAGE = "restore a newer copy of the ledger: docs/backup.md, After a restore"


def _lost(row: VersionRow, what: str) -> Problem:
    return Problem(
        row.published_seq,
        what,
        "put the version's directory back from a copy, or give it up: "
        f"policyline ledger withdraw {row.version} --reason ...",
    )


@dataclass(slots=True)
class Hashed:
    """Counts what was hashed again and equals what was published."""

    versions: int = 0
    files: int = 0
    size_bytes: int = 0


def check_storage(
    ledger: Ledger,
    storage: Storage,
    *,
    hashed: Hashed | None = None,
) -> Iterator[Problem]:
    """Hash every published version again; find versions without files, and files without a version.

    A withdrawn version may lack its files. The manifest stored with the files carries the ledger's
    head at the time: so a ledger that was truncated or replaced is found, even if it is consistent
    in itself.

    Args:
        ledger: only read.
        storage: only read.
        hashed: counts what was hashed, if given.

    Raises:
        LedgerUnavailable, StorageUnavailable: it does not answer; nothing is concluded from that.
    """
    present = set(storage.names())
    for line in [row.line for row in ledger.lines()]:
        known: set[str] = set()
        for row in ledger.versions(line=line):
            name = policy_name(line, row.version)
            if row.digest is None or row.collected:
                continue
            known.add(name)
            if row.state == "withdrawn":
                continue  # given up: missing or wrong bytes are no loss
            if name not in present:
                yield _lost(row, f"{name} is published, but storage has no {name}")
            else:
                yield from _check_version(ledger, storage, row, name, hashed or Hashed())
        unknown = (n for n in present - known if parse_policy_name(line, n) is not None)
        for name in sorted(unknown):
            yield from _check_unknown(ledger, storage, name)


def _check_version(
    ledger: Ledger, storage: Storage, row: VersionRow, name: str, hashed: Hashed
) -> Iterator[Problem]:
    try:
        manifest = Manifest.from_text(row.manifest or "")
        storage.confirm(name, manifest.files)
        hashed.versions += 1
        hashed.files += len(manifest.files)
        hashed.size_bytes += manifest.size_bytes
        stored = storage.read_head(name, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        if stored.decode(errors="replace") != row.manifest:
            yield _lost(row, f"{name}: its manifest is not the published one")
        yield from _check_surplus(storage, row, name, manifest)
    except (ManifestInvalid, ContentMismatch, FileMissing, UnsafePath) as error:
        yield _lost(row, f"{name}: {error}")
    else:
        yield from _check_anchor(ledger, manifest)


def _check_surplus(
    storage: Storage, row: VersionRow, name: str, manifest: Manifest
) -> Iterator[Problem]:
    """Files that were not published: sidecars do not copy what the manifest does not list."""
    listed = {MANIFEST_NAME, *(entry.path for entry in manifest.files)}
    surplus = [file for file in storage.files(name) if file not in listed]
    if surplus:
        more = f" and {len(surplus) - _SHOWN} more" if len(surplus) > _SHOWN else ""
        yield Problem(
            row.published_seq,
            f"{name} has files that its manifest does not list: "
            f"{', '.join(surplus[:_SHOWN])}{more}",
            "move such files out of the version's directory; nothing reads them",
        )


def _check_unknown(ledger: Ledger, storage: Storage, name: str) -> Iterator[Problem]:
    yield Problem(
        None, f"storage has {name}, which this ledger has not published", _OLDER_THAN_STORAGE
    )
    try:
        text = storage.read_head(name, MANIFEST_NAME, MAX_MANIFEST_BYTES).decode(errors="replace")
        yield from _check_anchor(ledger, Manifest.from_text(text))
    except (ManifestInvalid, FileMissing, UnsafePath):
        return


def _check_anchor(ledger: Ledger, manifest: Manifest) -> Iterator[Problem]:
    anchor = manifest.anchor
    if anchor.ledger_id != ledger.ledger_id:
        yield Problem(
            None,
            f"{manifest.name} belongs to another ledger ({anchor.ledger_id})",
            "give each ledger a storage, or a line, of its own",
        )
        return
    event = next(ledger.events(after=anchor.seq - 1, limit=1), None)
    if event is None or event.seq != anchor.seq:
        yield Problem(
            anchor.seq,
            f"{manifest.name} was anchored at event {anchor.seq}, where the ledger has none: "
            "the ledger was cut off",
            _OLDER_THAN_STORAGE,
        )
    elif event.hash != anchor.hash:
        yield Problem(
            anchor.seq,
            f"{manifest.name} was anchored at event {anchor.seq} with another hash: "
            "the chain was rewritten",
            _OLDER_THAN_STORAGE,
        )
