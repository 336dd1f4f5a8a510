"""Judges an adapter: can the server serve it as it is, and how would TRL bring it there?"""

from __future__ import annotations

from collections.abc import Iterator

from policyline.doctor.adapter_facts import AdapterFindings
from policyline.doctor.engine_findings import EngineFindings
from policyline.doctor.launch import served_rank
from policyline.doctor.model import Failure, Line, Window, failed
from policyline.doctor.trl import Choice, ServerSide, choose


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
        choice = choose(found.config, _server_side(engine), window.max_staleness)
        yield _sync_mode(choice, servable=not isinstance(found.source, Failure))


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


def _server_side(engine: EngineFindings | None) -> ServerSide | None:
    config = None if engine is None else engine.config
    if config is None:
        return None
    return ServerSide(
        has_lora=config.has_lora,
        data_parallel=config.data_parallel,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
    )


def _sync_mode(choice: Choice, *, servable: bool) -> Line:
    name = "adapter.trl_sync"
    match choice.mode:
        case "refuses":
            return Line("fail", name, f"TRL refuses to start: {choice.why}", "see engine lines")
        case "merged":
            return Line(
                "warn",
                name,
                f"merged: {choice.why}; TRL would send whole weights, not versions",
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
