"""Reads an adapter's directory as the publisher would, and judges it.

Can the server serve it as it is, and how would TRL bring it there?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policyline.doctor.engine_facts import EngineFindings
from policyline.doctor.launch import served_rank
from policyline.doctor.model import Failure, Line, Window, failed
from policyline.doctor.trl import SyncMode, choose
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


def examine_adapter(directory: Path, base_model: str | None) -> AdapterFindings:
    """Inspect a directory; its tensors' data are not read.

    Args:
        directory: as PEFT's `save_pretrained` leaves it.
        base_model: the directory of the model that it must fit; None when not known.
    """
    source: Source | Failure
    try:
        base = None if base_model is None else read_layer_sizes(Path(base_model))
        source = inspect(directory, base=base)
    except (PublisherError, StorageError) as error:
        source = Failure(error.message, error.hint)
    return AdapterFindings(directory, source, _config(directory))


def _config(directory: Path) -> Mapping[str, Any] | None:
    try:
        return parse_object(read_head(directory, CONFIG_NAME, MAX_CONFIG_BYTES).decode())
    except (StorageError, ValueError, RecursionError):
        return None


def adapter_lines(
    found: AdapterFindings, engine: EngineFindings | None, window: Window
) -> Iterator[Line]:
    """Everything about the adapter, with the server's limits where there is one."""
    yield _servable(found)
    if engine is not None and not (
        isinstance(engine.version, Failure) and engine.version.unreachable
    ):
        yield _rank(found.rank, engine.max_lora_rank)
    if found.config is not None:
        server = None if engine is None else engine.config
        mode, why = choose(found.config, server, window.max_staleness)
        yield _sync_mode(mode, why, servable=not isinstance(found.source, Failure))


def _servable(found: AdapterFindings) -> Line:
    if isinstance(found.source, Failure):
        return failed("adapter.servable", found.source)
    source = found.source
    size = sum(source.sizes.values())
    return Line(
        "pass",
        "adapter.servable",
        f"rank {source.config.highest_rank}, {len(source.layout)} tensors of {source.dtype}, "
        f"{size / 1e6:.3f} MB",
    )


def _rank(rank: int | None, limit: int | None) -> Line:
    name = "engine.max_lora_rank"
    if rank is None:
        return Line("skip", name, "the adapter's rank is not known")
    remedy = f"start vLLM with --max-lora-rank {served_rank(rank) or rank}"
    if limit is None:
        return Line("warn", name, f"not reported; the adapter has rank {rank}", remedy)
    if rank > limit:
        remedy = remedy if served_rank(rank) else "train a smaller rank: vLLM has no such limit"
        return Line("fail", name, f"{limit}; the adapter has rank {rank}", remedy)
    return Line("pass", name, f"{limit}; the adapter has rank {rank}")


def _sync_mode(mode: SyncMode, why: str, *, servable: bool) -> Line:
    name = "adapter.trl_sync"
    match mode:
        case "refuses":
            return Line("fail", name, f"TRL refuses to start: {why}", "see engine lines")
        case "merged":
            return Line(
                "warn",
                name,
                f"merged: {why}; TRL would send whole weights, not versions",
                "change that, or train without policyline",
            )
        case "adapter" if not servable:
            return Line(
                "warn",
                name,
                "adapter, although vLLM would refuse it at the first sync",
                "change what adapter.servable names",
            )
    return Line("pass", name, "adapter")
