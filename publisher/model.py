"""The parts of a publication: its result, its manifest, the caller's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from policyline.ledger.canonical import canonical, parse_object
from policyline.ledger.manifest import FileEntry, Manifest, version_digest
from policyline.ledger.store import Reservation
from policyline.publisher.check.source import Source
from policyline.publisher.errors import MetadataInvalid

MAX_METADATA_BYTES: Final = 1 << 20
"""Limit of a version's metadata as JSON: every reader of the manifest reads all of it."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is durable in the storage and recorded in the ledger."""

    version: int
    """Its number, unique within the line for ever."""
    name: str
    """The name to serve it under: `<line>-v<version>`."""
    digest: str
    """sha256 over the paths, sizes and sha256 of its files; hexadecimal."""
    size_bytes: int
    """Sum of its files' sizes, without the manifest."""
    path: str
    """Where it is in the storage: a local path, or a URL."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent: `save` (copy), `digest`, `check`, `commit` (fsync and rename), `append` (both
    transactions; the ledger records only the first of them), and the caller's own phases. Empty
    when the version had been published before."""


def as_json(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata as a reader of the manifest will get it.

    Raises:
        MetadataInvalid: JSON cannot hold it, or it is above MAX_METADATA_BYTES.
    """
    try:
        text = canonical(metadata)
        size = len(text.encode())
        read_back = parse_object(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise MetadataInvalid(
            f"metadata cannot be written as JSON: {error}",
            hint="use text, finite numbers, true, false, null, lists and objects",
        ) from error
    if size > MAX_METADATA_BYTES:
        raise MetadataInvalid(
            f"metadata takes {size} bytes as JSON, at most {MAX_METADATA_BYTES} are recorded",
            hint="record where the data are stored instead",
        )
    return read_back


def manifest_of(
    reservation: Reservation,
    source: Source,
    files: tuple[FileEntry, ...],
    metadata: Mapping[str, Any],
) -> Manifest:
    """The full description of a version whose files are staged."""
    config = source.config
    targets = config.target_modules
    return Manifest(
        line=reservation.line,
        run=reservation.run,
        version=reservation.version,
        epoch=reservation.epoch,
        attempt=reservation.attempt,
        digest=version_digest(files),
        files=files,
        anchor=reservation.anchor,
        adapter={
            "r": config.highest_rank,
            "lora_alpha": config.lora_alpha,
            "target_modules": targets if isinstance(targets, str) else _suffixes(targets),
            "base_model": config.base_model,
            "dtype": source.dtype,
        },
        metadata=metadata,
    )


def _suffixes(targets: Sequence[str]) -> list[str]:
    """PEFT may list every module of every layer; the last parts of the names are enough."""
    return sorted({target.rpartition(".")[2] for target in targets})
