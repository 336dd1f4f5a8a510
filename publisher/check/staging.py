"""Copies an adapter into a staging, hashes it on the way, and checks the copy."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from pathlib import Path

from policyline.ledger.manifest import FileEntry
from policyline.publisher.check.safetensors_header import all_zero, first_not_finite
from policyline.publisher.check.source import WEIGHTS_NAME, Source
from policyline.publisher.errors import CheckFailed
from policyline.storage.errors import reading, writing
from policyline.storage.files import copy_hashed, read_head


@dataclass(frozen=True, slots=True)
class Filled:
    """The files of a staging."""

    files: tuple[FileEntry, ...]
    zero_init: bool
    """Whether every B is zero, so that the adapter changes nothing yet."""
    phases: dict[str, float]
    """Seconds of `save` (copy), `digest` and `check`."""


def fill(source: Source, into: Path) -> Filled:
    """Copy the source's files. Each byte is read once from there, and hashed as it is copied.

    Raises:
        CheckFailed: a tensor is not finite, or the source changed since it was inspected.
        StorageError: it could not be read or written.
    """
    started = time.perf_counter()
    files: list[FileEntry] = []
    digest_s = 0.0
    for file in source.sizes:
        destination = into / file
        if "/" in file:
            with writing(destination):
                destination.parent.mkdir(parents=True, exist_ok=True)
        copied, hash_s = copy_hashed(source.directory, file, destination)
        files.append(copied)
        digest_s += hash_s
    copied_at = time.perf_counter()
    _check_unchanged(source, files, into)
    zero_init = check_numbers(source, into)
    return Filled(
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        zero_init=zero_init,
        phases={
            "save": copied_at - started - digest_s,
            "digest": digest_s,
            "check": time.perf_counter() - copied_at,
        },
    )


def _check_unchanged(source: Source, files: list[FileEntry], into: Path) -> None:
    """What was inspected is what was copied, so that the inspection holds for the copy."""
    for entry in files:
        head = source.heads.get(entry.path, b"")
        same = entry.size_bytes == source.sizes[entry.path]
        if not same or read_head(into, entry.path, len(head)) != head:
            raise CheckFailed(
                source.directory / entry.path,
                "it changed while it was being published",
                hint="publish after saving has ended",
            )


def check_numbers(source: Source, into: Path) -> bool:
    """Refuse NaN and infinity in the copy of `source` at `into` (or in the source itself).

    Returns:
        Whether every B is zero, so that the adapter changes nothing.

    Raises:
        CheckFailed: naming the tensor.
    """
    zero_init = True
    for file, header in source.headers.items():
        if not header.tensors:
            continue
        with (
            reading(into / file),
            (into / file).open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            bad = first_not_finite(content, header)
            if file == WEIGHTS_NAME:
                zero_init = all_zero(content, header, "lora_B")
        if bad is not None:
            raise CheckFailed(
                source.directory / file,
                f"tensor {bad!r} holds NaN or infinity",
                hint="training has diverged: go back to an earlier version",
            )
    return zero_init
