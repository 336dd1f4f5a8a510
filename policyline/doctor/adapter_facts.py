"""Reads an adapter's directory as the publisher would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policyline.doctor.model import Failure
from policyline.ledger.canonical import parse_object
from policyline.publisher.check.adapter_config import CONFIG_NAME
from policyline.publisher.check.base_model import read_layer_sizes
from policyline.publisher.check.source import MAX_CONFIG_BYTES, Source, inspect
from policyline.publisher.errors import PublisherError
from policyline.storage.errors import StorageError
from policyline.storage.files import read_head


@dataclass(frozen=True, slots=True)
class AdapterFindings:
    """One directory."""

    directory: Path
    source: Source | Failure
    """What the publisher sees, or why vLLM could not serve it as it is."""
    config: Mapping[str, Any] | None
    """adapter_config.json, if it can be read at all."""

    @property
    def rank(self) -> int | None:
        """The highest rank, if it could be read."""
        return self.source.config.highest_rank if isinstance(self.source, Source) else None

    @property
    def base_model(self) -> str | None:
        """What the configuration names as its base."""
        named = None if self.config is None else self.config.get("base_model_name_or_path")
        return named if isinstance(named, str) and named else None


def examine_adapter(directory: Path, base_model: Path | None) -> AdapterFindings:
    """Inspect a directory; its tensors' data are not read.

    Args:
        directory: as PEFT's `save_pretrained` leaves it.
        base_model: the directory of the model that it must fit; None when not known.
    """
    source: Source | Failure
    try:
        base = None if base_model is None else read_layer_sizes(base_model)
        source = inspect(directory, base=base)
    except (PublisherError, StorageError) as error:
        source = Failure(error.message, error.hint)
    return AdapterFindings(directory, source, _config(directory))


def _config(directory: Path) -> Mapping[str, Any] | None:
    try:
        return parse_object(read_head(directory, CONFIG_NAME, MAX_CONFIG_BYTES).decode())
    except (StorageError, ValueError, RecursionError):
        return None
