"""Measures what is given, then judges it all together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Final

from policyline.doctor.adapter import AdapterFindings, adapter_lines, examine_adapter
from policyline.doctor.engine_facts import EngineFindings, examine_engine
from policyline.doctor.engine_lines import cache_line, engine_lines, others_line
from policyline.doctor.identity_lines import Identity, identity_lines, other_adapters
from policyline.doctor.launch import launch_line
from policyline.doctor.ledger import (
    LedgerFindings,
    examine_ledger,
    ledger_lines,
    window_lines,
    window_of,
)
from policyline.doctor.model import Failure, Line, Report, Unanswered, Unreadable
from policyline.doctor.settings import Target
from policyline.doctor.storage import StorageFindings, examine_storage, storage_lines
from policyline.ledger.names import parse_policy_name
from policyline.ledger.settings import RunSettings
from policyline.watcher.threads import in_daemon_thread
from policyline.watcher.vllm.answers import EngineModels

_STOP_S: Final = 15.0
"""How long a measurement of a storage may take to clean up when it is no longer wanted."""
_WAITS: Final = 6
"""Waits of one measurement of a storage, each bounded by the time limit."""


async def examine(target: Target, on_progress: Callable[[str], None]) -> Report:
    """Measure and judge.

    Args:
        target: what to examine.
        on_progress: called with what is being measured.

    Raises:
        NoServerUrl: --vllm is no URL of a server.
    """
    engine = adapter = storage = ledger = None
    if target.vllm is not None:
        on_progress(f"asking {target.vllm}")
        engine = await examine_engine(
            target.vllm,
            api_key=target.api_key,
            cache=target.cache,
            timeout_s=target.timeout_s,
        )
    if target.adapter is not None:
        on_progress(f"reading {target.adapter}")
        adapter = examine_adapter(target.adapter, target.base_model)
    if target.ledger is not None:
        on_progress("asking the ledger")
        listed = _listed_versions(engine, target.line)
        ledger = await in_daemon_thread(
            lambda: examine_ledger(str(target.ledger), target.line, listed), "ledger"
        )
    if target.storage is not None:
        on_progress(f"writing to {target.storage} and reading it")
        storage = await _examine_storage(target.storage, target)
    return Report(tuple(judge(target, engine, adapter, storage, ledger)))


def judge(
    target: Target,
    engine: EngineFindings | None,
    adapter: AdapterFindings | None,
    storage: StorageFindings | None,
    ledger: LedgerFindings | None,
) -> Iterator[Line]:
    """All lines; pure. None: not given."""
    window = window_of(ledger, target.max_staleness, RunSettings().max_staleness)
    if ledger is not None:
        yield from ledger_lines(ledger)
        yield from window_lines(ledger, window)
    if storage is not None:
        yield from storage_lines(storage)
    if engine is not None:
        yield from engine_lines(engine, window)
        wanted = Identity(
            line=target.line,
            ledger_id=None if ledger is None or ledger.view is None else ledger.view.ledger_id,
            digests={} if ledger is None else ledger.digests,
            base_model=target.base_model,
            adapter_base=None if adapter is None else adapter.base_model,
        )
        yield from identity_lines(engine, wanted)
        yield from others_line(engine, window, other_adapters(engine, target.line))
        if target.cache is not None and engine.runtime_lora is not None:
            yield cache_line(engine, str(target.cache))
    if adapter is not None:
        yield from adapter_lines(adapter, engine, window)


def flags(target: Target) -> str:
    """The line that starts a vLLM server for this target; asks only ledger and adapter.

    Raises:
        Unreadable: one of the two that was given cannot be read.
    """
    ledger = None
    if target.ledger is not None and target.max_staleness is None:
        ledger = examine_ledger(target.ledger, target.line, ())
        _require("--ledger", ledger.failure or ledger.schema_mismatch)
    adapter = None
    if target.adapter is not None:
        adapter = examine_adapter(target.adapter, target.base_model)
        _require("--adapter", adapter.source if isinstance(adapter.source, Failure) else None)
    named = adapter.base_model if adapter is not None else None
    return launch_line(
        window_of(ledger, target.max_staleness, RunSettings().max_staleness),
        rank=adapter.rank if adapter is not None else None,
        base_model=target.base_model or named,
    )


def _require(option: str, failure: Failure | None) -> None:
    if failure is not None:
        kind = Unanswered if failure.unreachable else Unreadable
        raise kind(f"{option}: {failure.cause}", hint=failure.hint)


def _listed_versions(engine: EngineFindings | None, line: str) -> frozenset[int]:
    if engine is None or not isinstance(engine.models, EngineModels):
        return frozenset()
    numbers = (parse_policy_name(line, adapter.name) for adapter in engine.models.adapters)
    return frozenset(number for number in numbers if number is not None)


async def _examine_storage(url: str, target: Target) -> StorageFindings:
    """In a thread that is given up when a mount never answers."""
    stop = threading.Event()
    running = in_daemon_thread(
        lambda: examine_storage(url, target.sidecar_storage, timeout_s=target.timeout_s, stop=stop),
        "storage",
    )
    # nobody takes the result of one that was given up; asyncio would complain of its error
    running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    limit_s = _WAITS * target.timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.shield(running)
    except TimeoutError:
        dead = Failure(
            f"{url} does not answer within {limit_s:g} s; it may keep files .policyline-doctor-*",
            "check the mount",
            unreachable=True,
        )
        return StorageFindings(url, str(target.sidecar_storage or url), limit_s, failure=dead)
    finally:
        stop.set()
        await asyncio.wait({running}, timeout=_STOP_S)
