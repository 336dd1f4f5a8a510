"""Measures a vLLM server. It loads no adapter, and one trial load fails on purpose."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from policyline.doctor.engine_findings import (
    CacheAccess,
    EngineFindings,
    MetricsFacts,
    ServerConfig,
    read_config,
    read_metrics,
)
from policyline.doctor.examiner import Examiner
from policyline.doctor.model import Failure
from policyline.ledger.probe import PROBE_TOKENS
from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.answers import EngineModels
from policyline.watcher.vllm.errors import (
    AdapterRefused,
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    RuntimeLoraDisabled,
)

T = TypeVar("T")

_CONNECTIONS: Final = 4
"""Connections on which the incarnation is read: a balancer would spread them over servers."""

_UNANSWERED: Final = (EngineUnreachable, EngineTimeout, EngineDead)


class NoServerUrl(ValueError):
    """The URL of the server is none."""


async def examine_engine(
    url: str, *, api_key: str | None, cache: Path | None, timeout_s: float
) -> EngineFindings:
    """Ask a server everything.

    Args:
        url: of the server.
        api_key: sent to it only.
        cache: directory of local copies, to see whether the engine reads it; may not exist.
        timeout_s: longest wait for one answer.

    Raises:
        NoServerUrl: not a URL of a server.
    """

    def connect() -> Examiner:
        timeouts = EngineTimeouts(
            connect_s=min(EngineTimeouts().connect_s, timeout_s),
            observe_s=timeout_s,
            load_s=timeout_s,
            score_s=timeout_s,
            control_s=timeout_s,
        )
        try:
            return Examiner(url, api_key=api_key, timeouts=timeouts)
        except ValueError as error:
            raise NoServerUrl(str(error)) from error

    async with connect() as engine:
        version = await attempt(engine.version())
        found = EngineFindings(engine.base_url, version)
        if isinstance(version, Failure) and version.unreachable:
            return found
        found = await _configuration(engine, found)
        found = await _loading(engine, found, cache)
        found = await _answers(engine, found)
        # last: without development routes vLLM reports its slots in them from its first answer on
        return replace(found, metrics=await attempt(_metrics(connect)))


async def _configuration(engine: Examiner, found: EngineFindings) -> EngineFindings:
    info = await attempt(engine.server_info())
    config = read_config(info) if isinstance(info, Mapping) else info
    return replace(
        found,
        models=await attempt(engine.models()),
        server=config,
        dev_endpoints=None if isinstance(info, Failure) else info is not None,
        lora_enabled=config.has_lora if isinstance(config, ServerConfig) else None,
        runtime_lora=await attempt(engine.has_load_route()),
    )


async def _loading(engine: Examiner, found: EngineFindings, cache: Path | None) -> EngineFindings:
    """The trial load: of a configuration that is no JSON, in the cache or where nothing is."""
    if found.runtime_lora is not True or (cache is None and found.lora_enabled is not None):
        return found
    name = f"policyline-doctor-{uuid.uuid4().hex[:12]}"
    try:
        with _trial_directory(cache) as path:
            await engine.load(name, str(path))
    except AdapterRefused as refused:
        seen: CacheAccess = "unknown"
        if cache is not None:
            seen = "does not see" if refused.reason == "files_missing" else "reads"
        return replace(found, lora_enabled=True, cache_access=seen)
    except RuntimeLoraDisabled:
        return replace(found, lora_enabled=False)
    except EngineError as error:
        return replace(found, cache_access=failure(error))
    except OSError as error:
        return replace(found, cache_access=Failure(f"cache {cache}: {error.strerror}", _WRITABLE))
    return replace(found, cache_access=Failure(f"the engine loaded {name}, which is no adapter"))


_WRITABLE: Final = "make --cache writable for this user"


@contextlib.contextmanager
def _trial_directory(cache: Path | None) -> Iterator[Path]:
    if cache is None:
        yield Path(f"/policyline-doctor/{uuid.uuid4().hex}")
        return
    home = cache.expanduser().resolve()
    made = [d for d in (home, *home.parents) if not d.exists()]
    home.mkdir(parents=True, exist_ok=True)
    trial = Path(tempfile.mkdtemp(prefix=".doctor-", dir=home))
    try:
        trial.chmod(0o755)  # mkdtemp makes it private, and vLLM may be another user
        (trial / "adapter_config.json").write_text("not JSON, on purpose: policyline doctor\n")
        yield trial
    finally:
        shutil.rmtree(trial, ignore_errors=True)
        for directory in made:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                directory.rmdir()


async def _metrics(connect: Callable[[], Examiner]) -> MetricsFacts:
    texts = []
    for _ in range(_CONNECTIONS):
        async with connect() as engine:
            texts.append(await engine.metrics())
    return read_metrics(texts)


async def _answers(engine: Examiner, found: EngineFindings) -> EngineFindings:
    if found.dev_endpoints:
        paused = await attempt(engine.is_paused())
        if paused is not False:
            return replace(
                found,
                paused=paused if paused is True else None,
                scores_s=paused if isinstance(paused, Failure) else None,
            )
        found = replace(found, paused=False)
    if not isinstance(found.models, EngineModels):
        return found
    scores = await attempt(_score_twice(engine, found.models.base.name))
    if isinstance(scores, Failure):
        return replace(found, scores_s=scores)
    return replace(
        found,
        scores_s=scores,
        unknown_served=await attempt(
            engine.serves_unknown(f"policyline-doctor-{uuid.uuid4().hex[:12]}")
        ),
        nameless_served=await attempt(engine.serves_nameless()),
    )


async def _score_twice(engine: Examiner, model: str) -> tuple[float, ...]:
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        await engine.score(model, PROBE_TOKENS)
        taken.append(time.perf_counter() - started)
    return tuple(taken)


async def attempt(call: Awaitable[T]) -> T | Failure:
    """The value, or why there is none."""
    try:
        return await call
    except EngineError as error:
        return failure(error)


def failure(error: EngineError) -> Failure:
    """What an engine error means to an operator."""
    return Failure(str(error), error.hint, unreachable=isinstance(error, _UNANSWERED))
