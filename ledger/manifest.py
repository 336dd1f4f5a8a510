"""The manifest: the full description of one version. Pure; its content is untrusted input.

It is written as `manifest.json` next to the adapter's files and, as text, into the event that
publishes the version.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from policyline.ledger.canonical import canonical, parse_object
from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.names import check_label, check_line, policy_name

MANIFEST_NAME = "manifest.json"
MANIFEST_SCHEMA = 1
ALLOWED_SUFFIXES = frozenset({".safetensors", ".json", ".md"})
MAX_FILES = 256
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a version: POSIX path relative to its directory, size in bytes, sha256 hex."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """The ledger's head when the number was reserved: a witness outside the database."""

    ledger_id: str
    seq: int
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known about a version when it was published."""

    line: str
    run: str
    version: int
    epoch: int
    attempt: str
    """Identifies the staging attempt; a file found with another attempt is not this version."""
    digest: str
    """sha256 hex over the sorted (path, size, sha256) of `files`."""
    files: tuple[FileEntry, ...]
    anchor: Anchor
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """What servers need to know: `r`, `lora_alpha`, `target_modules`, `base_model`, `dtype`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The caller's own: optimizer step, learning rate, lineage, ..."""

    @property
    def name(self) -> str:
        """The policy name that an engine serves."""
        return policy_name(self.line, self.version)

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of the files, without the manifest."""
        return sum(entry.size_bytes for entry in self.files)

    def to_text(self) -> str:
        """Canonical JSON."""
        return canonical(
            {
                "schema": MANIFEST_SCHEMA,
                "line": self.line,
                "run": self.run,
                "version": self.version,
                "epoch": self.epoch,
                "attempt": self.attempt,
                "digest": self.digest,
                "files": [asdict(entry) for entry in self.files],
                "anchor": asdict(self.anchor),
                "adapter": dict(self.adapter),
                "metadata": dict(self.metadata),
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Parse and distrust: types, paths, digest.

        Raises:
            ManifestInvalid: malformed, a path that leaves the directory, a suffix that is not
                allowed, or a digest that is not the digest of the files.
        """
        try:
            raw = parse_object(text)
            manifest = cls(
                line=check_line(_text(raw, "line")),
                run=check_label("run", _text(raw, "run")),
                version=_positive(raw, "version"),
                epoch=_positive(raw, "epoch"),
                attempt=check_label("attempt", _text(raw, "attempt")),
                digest=_text(raw, "digest"),
                files=tuple(
                    FileEntry(
                        path=_text(f, "path"),
                        size_bytes=_natural(f, "size_bytes"),
                        sha256=_text(f, "sha256"),
                    )
                    for f in raw["files"]
                ),
                anchor=Anchor(
                    ledger_id=_text(raw["anchor"], "ledger_id"),
                    seq=_natural(raw["anchor"], "seq"),
                    hash=_text(raw["anchor"], "hash"),
                ),
                adapter=_mapping(raw, "adapter"),
                metadata=_mapping(raw, "metadata"),
            )
        except ManifestInvalid:
            raise
        except Exception as error:  # untrusted text can fail in any way; all mean the same
            raise ManifestInvalid(f"manifest cannot be read: {error!s:.200}") from error
        if raw.get("schema") != MANIFEST_SCHEMA:
            raise ManifestInvalid(
                f"manifest has schema {raw.get('schema')!r:.20}, this release reads "
                f"{MANIFEST_SCHEMA}",
                hint="use the release of policyline that wrote it",
            )
        check_files(manifest.files)
        if version_digest(manifest.files) != manifest.digest:
            raise ManifestInvalid(f"manifest of {manifest.name} disagrees with its own digest")
        return manifest


def version_digest(files: Iterable[FileEntry]) -> str:
    """sha256 hex over the sorted (path, size, sha256), one line each."""
    state = hashlib.sha256()
    for entry in sorted(files, key=lambda f: f.path):
        state.update(f"{entry.path}\0{entry.size_bytes}\0{entry.sha256}\n".encode())
    return state.hexdigest()


def check_files(files: tuple[FileEntry, ...]) -> None:
    """Refuse anything but plain relative paths of allowed types, each once.

    Raises:
        ManifestInvalid: naming the path.
    """
    if not files or len(files) > MAX_FILES:
        raise ManifestInvalid(f"manifest lists {len(files)} files, allowed are 1 to {MAX_FILES}")
    seen: set[str] = set()
    for entry in files:
        check_path(entry.path)
        if entry.path in seen or entry.path == MANIFEST_NAME:
            raise ManifestInvalid(f"manifest lists {entry.path!r} twice or lists itself")
        if not _SHA256.fullmatch(entry.sha256):
            raise ManifestInvalid(f"manifest has a malformed sha256 for {entry.path!r}")
        seen.add(entry.path)


def check_path(path: str) -> None:
    """Refuse a path that is not plain, relative and inside, or whose type is not allowed.

    Raises:
        ManifestInvalid: naming the path.
    """
    parts = path.split("/")
    hidden = any(part.startswith(".") or not part for part in parts)
    if hidden or "\\" in path or not path.isprintable() or len(path) > 512:
        raise ManifestInvalid(f"path {path!r:.200} is not a plain relative path inside a version")
    if posixpath.splitext(path)[1] not in ALLOWED_SUFFIXES:
        raise ManifestInvalid(
            f"file {path!r:.200} is not allowed in a version",
            hint=f"keep only {', '.join(sorted(ALLOWED_SUFFIXES))}",
        )


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise ManifestInvalid(f"manifest field {key!r} is not text")
    return value


def _natural(raw: Mapping[str, Any], key: str) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ManifestInvalid(f"manifest field {key!r} is not a number >= 0")
    return value


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = _natural(raw, key)
    if value == 0:
        raise ManifestInvalid(f"manifest field {key!r} is not a number >= 1")
    return value


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise ManifestInvalid(f"manifest field {key!r} is not an object")
    return value
