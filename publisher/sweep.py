"""Sweeping: finishes or puts away what publishers left behind that died (I5).

It changes attempts of older epochs of this run, and directories under a name of this line that no
ledger knows. It never changes what belongs to another run.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import MANIFEST_NAME, Manifest
from policyline.ledger.names import parse_policy_name
from policyline.ledger.rows import VersionRow
from policyline.ledger.store import Claim, Ledger
from policyline.publisher.errors import UnknownVersion
from policyline.storage import ContentMismatch, FileMissing, Storage, UnsafePath

log = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 16 << 20
"""Above any real manifest: 256 files take 40 kB, metadata at most 1 MiB."""
_INCOMPLETE = (ManifestInvalid, FileMissing, ContentMismatch, UnsafePath)


def sweep(ledger: Ledger, storage: Storage, claim: Claim) -> None:
    """Finish or put away what older epochs of the claimed run left.

    It may be interrupted at any point and run again. A publisher that is fenced meanwhile does no
    harm: a directory is put away only after its version was rejected. Only the holder of the epoch
    may reject, and a rejected version is never adopted.

    Raises:
        UnknownVersion: a complete version of this line that the ledger does not know.
        StaleEpoch: another publisher took the run over meanwhile.
        StorageUnavailable: the storage does not answer; nothing was changed.
    """
    present, rows = _inventory(ledger, storage, claim.line)
    _Sweep(ledger, storage, claim, rows).run(present)


def check_known(ledger: Ledger, storage: Storage, line: str) -> None:
    """Refuse a storage that belongs to another ledger, before a run is opened for it.

    Raises:
        UnknownVersion: a complete version of this line that the ledger does not know.
        StorageUnavailable: the storage does not answer.
    """
    present, rows = _inventory(ledger, storage, line)
    for version, name in sorted(present.items()):
        if version not in rows:
            _why_unknown(ledger, storage, name)


def _inventory(
    ledger: Ledger, storage: Storage, line: str
) -> tuple[dict[int, str], dict[int, VersionRow]]:
    """Version -> its name in the storage, and version -> its row in the ledger."""
    # names first: a directory that is in place was reserved before, so its row is found
    present = {
        version: name
        for name in storage.names()
        if (version := parse_policy_name(line, name)) is not None
    }
    return present, {row.version: row for row in ledger.versions(line=line)}


def _why_unknown(ledger: Ledger, storage: Storage, name: str) -> str:
    """Why a directory that the ledger does not know is not a version.

    Raises:
        UnknownVersion: it is a complete one.
    """
    try:
        manifest = _manifest(storage, name)
    except _INCOMPLETE as error:
        return f"the ledger does not know it: {error}"
    theirs = manifest.anchor.ledger_id
    whose = (
        "that this ledger has lost (was it restored from an older copy?)"
        if theirs == ledger.ledger_id
        else f"of another ledger ({theirs})"
    )
    raise UnknownVersion(
        f"{storage.locate(name)} is a version {whose}; its name must not be reused",
        name=name,
        ledger_id=theirs,
        hint="use that ledger, another --storage, or another --line",
    )


class _Sweep:
    def __init__(
        self, ledger: Ledger, storage: Storage, claim: Claim, rows: Mapping[int, VersionRow]
    ) -> None:
        self._ledger = ledger
        self._storage = storage
        self._claim = claim
        self._rows = rows
        self._done: dict[str, list[str]] = defaultdict(list)
        """What was done -> names of versions and stagings."""

    def run(self, present: Mapping[int, str]) -> None:
        for version, name in sorted(present.items()):
            if version not in self._rows:
                why = _why_unknown(self._ledger, self._storage, name)
                self._quarantine(name, "unknown", why)
        self._discard_stagings()
        for version, row in sorted(self._rows.items()):
            if self._is_ours(row) and row.state in {"reserved", "rejected"}:
                self._settle(row, present.get(version))
        if self._done:
            done = "; ".join(f"{what} {', '.join(names)}" for what, names in self._done.items())
            log.warning("swept run %s: %s", self._claim.run, done, extra={"event": "swept"})

    def _is_ours(self, row: VersionRow) -> bool:
        return row.run == self._claim.run and row.epoch < self._claim.epoch

    def _discard_stagings(self) -> None:
        for staging in self._storage.stagings():
            version = parse_policy_name(self._claim.line, staging.name)
            row = self._rows.get(version or 0)
            if row is not None and self._is_ours(row) and row.attempt == staging.attempt:
                self._storage.discard(staging)
                self._done["discarded"].append(staging.name)

    def _settle(self, row: VersionRow, name: str | None) -> None:
        """Adopt the attempt's directory, or reject the reservation and put the directory away."""
        reason = "its publisher died before the files were committed"
        if name is not None:
            fault = self._adopt(row, name)
            if fault is None:
                return
            reason = fault
        if row.state == "reserved":
            self._ledger.reject(self._claim, row.version, f"swept: {reason}")
            self._done["rejected"].append(f"{row.line}-v{row.version}")
        if name is not None:
            self._quarantine(name, row.attempt, reason)

    def _adopt(self, row: VersionRow, name: str) -> str | None:
        """Publish the directory if it is what was reserved; otherwise return why not."""
        if row.state != "reserved":
            return f"its version is {row.state}: {row.reason}"
        try:
            manifest = _manifest(self._storage, name)
            fault = _disagreement(manifest, row, self._ledger.ledger_id)
            if fault is not None:
                return fault
            self._storage.confirm(name, manifest.files)
        except _INCOMPLETE as error:
            return str(error)
        self._ledger.publish(self._claim, manifest)
        self._done["adopted"].append(name)
        return None

    def _quarantine(self, name: str, attempt: str, why: str) -> None:
        try:
            where = self._storage.quarantine(name, attempt, why)
        except FileMissing:
            return  # another sweep was faster
        log.warning("%s was moved to %s: %s", name, where, why, extra={"event": "quarantined"})
        self._done["quarantined"].append(name)


def _manifest(storage: Storage, name: str) -> Manifest:
    content = storage.read_head(name, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    return Manifest.from_text(content.decode(errors="replace"))


def _disagreement(manifest: Manifest, row: VersionRow, ledger_id: str) -> str | None:
    """The first field in which manifest and reservation differ; None when they agree."""
    pairs = (
        ("line", manifest.line, row.line),
        ("run", manifest.run, row.run),
        ("version", manifest.version, row.version),
        ("epoch", manifest.epoch, row.epoch),
        ("attempt", manifest.attempt, row.attempt),
        ("ledger", manifest.anchor.ledger_id, ledger_id),
        ("reservation", manifest.anchor.seq, row.reserved_seq),
    )
    for field, found, expected in pairs:
        if found != expected:
            return f"its manifest has {field} {found}, reserved was {expected}"
    return None
