"""The bytes: one small interface over places that hold versions. Knows names, files and digests.

It knows no version, no run and no ledger; what a name means is decided by its callers.
"""

from __future__ import annotations

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
    "hash_file",
    "open_storage",
    "verify_files",
]


def open_storage(url: str) -> Storage:
    """Open a storage: a directory, local or mounted, as a plain path or `file://` URL.

    Touches nothing: an absent directory shows at the first use, so that a watcher may start
    before its mount.

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
