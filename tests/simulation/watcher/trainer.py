"""The trainer of the simulation: publishes good versions and three kinds of bad ones."""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from policyline.demo.synthetic import adapter_config, adapter_tensors, write_files
from policyline.ledger import Ledger
from policyline.ledger.manifest import FileEntry, Manifest, version_digest
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.publisher import Publisher
from policyline.storage import DirectoryStorage
from tests.simulation.watcher.settings import (
    RUN,
    WEIGHTS,
)

Kind = Literal["good", "corrupt", "refused", "missing"]


class Trainer:
    """Publishes to one storage, and remembers what the bytes of each version were.

    Args:
        ledger: its own.
        root: of the storage.
    """

    def __init__(self, ledger: Ledger, root: Path) -> None:
        self.ledger = ledger
        self._root = root
        self._storage = DirectoryStorage(root)
        self.kinds: dict[int, Kind] = {}
        self.hashes: dict[int, str] = {}
        self._originals: dict[int, Path] = {}

    def publish(self, kind: Kind) -> int:
        """Publish the next version."""
        seed = len(self.kinds) + 1
        adapter = _adapter(seed, refused=kind == "refused")
        if kind == "refused":
            version = self._publish_unchecked(adapter)
        else:
            with Publisher(self.ledger, self._storage, run="run", settings=RUN) as publisher:
                version = publisher.publish(adapter).version
        copy = self._root / policy_name(DEFAULT_LINE, version)
        self._originals[version] = adapter
        self.hashes[version] = hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()
        self.kinds[version] = kind
        if kind == "corrupt":
            content = bytearray((copy / WEIGHTS).read_bytes())
            content[-1] ^= 0xFF
            (copy / WEIGHTS).write_bytes(content)
        elif kind == "missing":
            (copy / WEIGHTS).unlink()
        return version

    def _publish_unchecked(self, adapter: Path) -> int:
        """As a publisher would that checks nothing."""
        claim = self.ledger.open_run("run", settings=RUN)
        reservation = self.ledger.reserve(claim)
        copy = self._root / policy_name(DEFAULT_LINE, reservation.version)
        shutil.copytree(adapter, copy)
        files = tuple(
            FileEntry(
                path=file.name,
                size_bytes=file.stat().st_size,
                sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
            )
            for file in sorted(copy.iterdir())
        )
        manifest = Manifest(
            line=claim.line,
            run=claim.run,
            version=reservation.version,
            epoch=reservation.epoch,
            attempt=reservation.attempt,
            digest=version_digest(files),
            files=files,
            anchor=reservation.anchor,
            metadata={},
        )
        self.ledger.publish(claim, manifest)
        self.ledger.release(claim)
        return reservation.version

    def restore_missing(self) -> None:
        """Put back the files that were removed."""
        for version, kind in self.kinds.items():
            if kind == "missing":
                copy = self._root / policy_name(DEFAULT_LINE, version)
                shutil.copy(self._originals[version] / WEIGHTS, copy / WEIGHTS)


@functools.cache
def _adapter(seed: int, *, refused: bool) -> Path:
    """An adapter; `refused` claims a rank above the engine's, and only that."""
    root = Path(tempfile.mkdtemp(prefix="policyline-sim-"))
    return write_files(root, adapter_config(16 if refused else 1), adapter_tensors(seed))
