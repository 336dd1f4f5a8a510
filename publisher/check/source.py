"""The directory that is to be published, checked before a version number is reserved for it.

Reads names, sizes, the configuration and the headers. The tensors' data are read only once, while
they are copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policyline.ledger.errors import ManifestInvalid
from policyline.ledger.manifest import (
    MANIFEST_NAME,
    MAX_FILES,
    FileEntry,
    check_path,
    version_digest,
)
from policyline.publisher.check.adapter_config import (
    CONFIG_NAME,
    AdapterConfig,
    ConfigInvalid,
    parse_config,
)
from policyline.publisher.check.base_model import LayerSizes
from policyline.publisher.check.lora import (
    check_base,
    check_lora,
    summary,
    unservable_tensors,
)
from policyline.publisher.check.safetensors_header import Header, HeaderInvalid, Layout, read_header
from policyline.publisher.errors import CheckFailed
from policyline.storage.errors import reading
from policyline.storage.files import hash_file, read_head

WEIGHTS_NAME = "adapter_model.safetensors"
"""The only weights file that vLLM 0.32 reads (besides pickles, which are refused here)."""
MAX_CONFIG_BYTES = 1 << 20
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
_MERGED = "train without it, or serve merged weights (merged sync)"


@dataclass(frozen=True, slots=True)
class Source:
    """A directory that passed every check that needs no tensor data."""

    directory: Path
    sizes: Mapping[str, int]
    """Relative POSIX path -> size in bytes."""
    config: AdapterConfig
    heads: Mapping[str, bytes]
    """The bytes that were checked: each safetensors file's header, and the configuration."""
    headers: Mapping[str, Header] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Shapes of the adapter's tensors."""
        return self.headers[WEIGHTS_NAME].layout

    @property
    def dtype(self) -> str:
        """The adapter's dtypes by safetensors' names, joined by commas."""
        return ",".join(sorted({t.dtype for t in self.headers[WEIGHTS_NAME].tensors.values()}))

    def digest(self) -> str:
        """The digest of the version that publishing its files as they are now would make."""
        return version_digest(
            [FileEntry(file, *hash_file(self.directory / file)) for file in self.sizes]
        )


def inspect(
    directory: Path, *, base: LayerSizes | None = None, max_lora_rank: int | None = None
) -> Source:
    """Read everything but the tensors' data and check it.

    Args:
        directory: as PEFT's `save_pretrained` leaves it.
        base: the model it must fit; None when not known.
        max_lora_rank: the servers' `--max-lora-rank`; None when not known.

    Raises:
        CheckFailed: naming the file, what is wrong and what to do.
        StorageError: it cannot be read.
    """
    sizes = dict(_files(directory))
    _check_names(directory, sizes)
    size = sizes[CONFIG_NAME]
    if size > MAX_CONFIG_BYTES:
        raise CheckFailed(
            directory / CONFIG_NAME, f"it has {size} bytes, allowed are {MAX_CONFIG_BYTES}"
        )
    heads = {CONFIG_NAME: read_head(directory, CONFIG_NAME, size)}
    headers: dict[str, Header] = {}
    for file, size in sizes.items():
        if file.endswith(".safetensors"):
            heads[file], headers[file] = _header(directory, file, size)
    config = _config(directory, heads[CONFIG_NAME], headers[WEIGHTS_NAME])
    if max_lora_rank is not None and config.highest_rank > max_lora_rank:
        raise CheckFailed(
            directory / CONFIG_NAME,
            f"rank {config.highest_rank} is above the servers' limit {max_lora_rank}",
            hint=f"start the servers with --max-lora-rank {config.highest_rank}, or train a "
            "smaller one",
        )
    faults = check_lora(config, headers[WEIGHTS_NAME].tensors)
    if faults:
        raise CheckFailed(directory / WEIGHTS_NAME, summary(faults), hint="save it again")
    source = Source(directory, sizes, config, heads, headers)
    faults = check_base(config, source.layout, base) if base is not None else []
    if faults:
        raise CheckFailed(
            directory / WEIGHTS_NAME,
            f"it does not fit the base model: {summary(faults)}",
            hint="publish an adapter trained on this base model, whole",
        )
    return source


def _config(directory: Path, text: bytes, weights: Header) -> AdapterConfig:
    try:
        config, reasons = parse_config(text.decode())
    except ValueError as error:
        text_of = error if isinstance(error, ConfigInvalid) else "it is not UTF-8 text"
        raise CheckFailed(
            directory / CONFIG_NAME, str(text_of), hint="save it again with PEFT's save_pretrained"
        ) from error
    reasons += unservable_tensors(weights.tensors)
    if reasons:
        raise CheckFailed(
            directory, f"vLLM cannot serve this adapter: {'; '.join(reasons)}", hint=_MERGED
        )
    return config


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    """Every file below, by its relative path; links and special files are refused."""
    if not directory.is_dir():
        found = "is not a directory" if directory.exists() else "does not exist"
        raise CheckFailed(directory, found, hint="give the directory that PEFT saved")
    below = [directory]
    while below:
        here = below.pop()
        with reading(here), os.scandir(here) as entries:
            found_here = sorted(entries, key=lambda e: e.name)
        for entry in found_here:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                below.append(path)
            elif entry.is_file(follow_symlinks=False):
                with reading(path):
                    size = entry.stat(follow_symlinks=False).st_size
                yield path.relative_to(directory).as_posix(), size
            else:
                kind = "a symbolic link" if entry.is_symlink() else "no plain file"
                raise CheckFailed(
                    path,
                    f"it is {kind}, which a version cannot hold",
                    hint="publish a directory of plain files (cp -rL makes one)",
                )


def _check_names(directory: Path, sizes: Mapping[str, int]) -> None:
    pickles = [name for name in sizes if Path(name).suffix in _PICKLES]
    if pickles:
        raise CheckFailed(
            directory / pickles[0],
            "it is a pickle, which runs code when it is read",
            hint="remove it; save weights with save_pretrained(..., safe_serialization=True)",
        )
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if name not in sizes:
            raise CheckFailed(
                directory, f"it has no {name}", hint="save it with PEFT's save_pretrained"
            )
    if MANIFEST_NAME in sizes:
        raise CheckFailed(
            directory / MANIFEST_NAME,
            "this name belongs to policyline",
            hint="remove it; a published version is copied without it",
        )
    if len(sizes) > MAX_FILES:
        raise CheckFailed(directory, f"it has {len(sizes)} files, allowed are {MAX_FILES}")
    for name in sizes:
        try:
            check_path(name)
        except ManifestInvalid as error:
            raise CheckFailed(directory / name, str(error)) from error


def _header(directory: Path, file: str, size: int) -> tuple[bytes, Header]:
    try:
        return read_header(lambda n: read_head(directory, file, n), size)
    except HeaderInvalid as error:
        raise CheckFailed(
            directory / file,
            f"it is not a complete safetensors file: {error}",
            hint="publish after saving has ended, or save it again",
        ) from error
