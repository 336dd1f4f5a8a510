"""The bytes: one small interface over what holds versions. Knows names, files and digests.

It knows no version, no run and no ledger; what a name means is decided by its callers.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from policyline.storage.directory import DirectoryStorage
from policyline.storage.errors import (
    ContentMismatch,
    FileMissing,
    NameTaken,
    SchemeUnsupported,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StorageUnwritable,
    UnsafePath,
    writing,
)
from policyline.storage.files import hash_file, verify_files
from policyline.storage.interface import Staging, Storage

__all__ = [
    "ContentMismatch",
    "DirectoryStorage",
    "FileMissing",
    "NameTaken",
    "SchemeUnsupported",
    "Staging",
    "Storage",
    "StorageError",
    "StorageFull",
    "StorageUnavailable",
    "StorageUnwritable",
    "UnsafePath",
    "create_if_missing",
    "hash_file",
    "open_storage",
    "verify_files",
]

log = logging.getLogger(__name__)


def create_if_missing(url: str) -> bool:
    """Create the directory of a storage that is not there yet, and log that.

    Returns:
        Whether it was created by this call.

    Raises:
        SchemeUnsupported: not a directory's URL.
        StorageUnavailable, StorageUnwritable, StorageFull: it cannot be created.
    """
    root = Path(open_storage(url).url)
    if root.exists():
        return False
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    log.info("created the storage %s", root, extra={"event": "storage_created"})
    return True


def open_storage(url: str) -> Storage:
    """Open a storage: a directory, local or mounted, as a plain path or `file://` URL.

    Reads and writes nothing: a missing directory shows at the first use, so that a sidecar may
    start before its mount.

    Raises:
        SchemeUnsupported: another kind of URL.
    """
    scheme = get_protocol(url) if url else ""
    if scheme not in {"file", "local"}:
        raise SchemeUnsupported(
            f"storage {url!r} is not a directory" if url else "storage has an empty URL",
            hint="give a path or file:// URL; mount a bucket to use one",
        )
    _, path = url_to_fs(url)
    return DirectoryStorage(Path(path))
