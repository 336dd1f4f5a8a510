"""Measures a vLLM server. It loads no adapter, and one trial load fails on purpose."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from policyline.doctor.model import Failure
from policyline.ledger.probe import PROBE_TOKENS
from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.answers import EngineModels, read_field, read_incarnation
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import (
    AdapterMissing,
    AdapterRefused,
    EngineDead,
    EngineError,
    EngineFault,
    EngineTimeout,
    EngineUnreachable,
    RequestRefused,
    RuntimeLoraDisabled,
)

T = TypeVar("T")

_CONNECTIONS: Final = 4
"""Connections on which the incarnation is read: a balancer would spread them over servers."""

_UNANSWERED: Final = (EngineUnreachable, EngineTimeout, EngineDead)
_ONE_TOKEN: Final[Mapping[str, Any]] = {"prompt": [1], "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The answer of GET /server_info (development mode)."""

    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None
    has_lora: bool
    """Whether it was started with --enable-lora."""
    data_parallel: int
    api_servers: int | None
    environment: Mapping[str, Any]
    """Its VLLM_ variables, defaults included; those that are None are left out."""


@dataclass(frozen=True, slots=True)
class MetricsFacts:
    """The answer of GET /metrics."""

    incarnations: tuple[str, ...]
    """Process start time on each connection; empty when it is not there."""
    engines: int
    """How many engines the request counters name; 0 when there are none."""
    max_loras: int | None
    """As a label; vLLM shows it once adapters had requests."""


CacheAccess = Literal["reads", "does not see", "unknown"]
"""What became of a load from the cache directory."""


@dataclass(frozen=True, slots=True)
class EngineFindings:
    """One server. None: not measured, because something before it failed."""

    url: str
    version: str | Failure
    models: EngineModels | Failure | None = None
    server: ServerConfig | Failure | None = None
    """None also when the development routes are off."""
    runtime_lora: bool | Failure | None = None
    lora_enabled: bool | None = None
    cache_access: CacheAccess | Failure | None = None
    metrics: MetricsFacts | Failure | None = None
    paused: bool | None = None
    scores_s: tuple[float, ...] | Failure | None = None
    """Two scored requests to the base model, one after the other."""
    unknown_served: bool | Failure | None = None
    nameless_served: bool | Failure | None = None

    @property
    def config(self) -> ServerConfig | None:
        """The server's configuration, if it reports one."""
        return self.server if isinstance(self.server, ServerConfig) else None

    @property
    def max_loras(self) -> int | None:
        """Adapter slots: as configured, else as the metrics show them."""
        if self.config is not None:
            return self.config.max_loras
        return self.metrics.max_loras if isinstance(self.metrics, MetricsFacts) else None

    @property
    def max_lora_rank(self) -> int | None:
        """The highest rank it takes, if it reports that."""
        return None if self.config is None else self.config.max_lora_rank


_ENGINE_LABEL: Final = re.compile(
    r'^vllm:num_requests_running\{[^}]*?engine="([^"]*)"', re.MULTILINE
)
_MAX_LORA: Final = re.compile(r'^vllm:lora_requests_info\{[^}]*?max_lora="(\d+)"', re.MULTILINE)


def read_metrics(texts: list[str]) -> MetricsFacts:
    """Several answers of GET /metrics together."""
    incarnations = []
    for text in texts:
        with contextlib.suppress(EngineFault):
            incarnations.append(read_incarnation(text))
    slots = _MAX_LORA.findall(texts[-1])
    return MetricsFacts(
        incarnations=tuple(incarnations),
        engines=len(set(_ENGINE_LABEL.findall(texts[-1]))),
        max_loras=int(slots[-1]) if slots else None,
    )


def read_config(info: Mapping[str, Any]) -> ServerConfig:
    """The parts of GET /server_info?config_format=json that matter (vLLM 0.32)."""
    config = _section(info, "vllm_config")
    lora, parallel = _section(config, "lora_config"), _section(config, "parallel_config")
    return ServerConfig(
        max_loras=_number(lora, "max_loras"),
        max_cpu_loras=_number(lora, "max_cpu_loras"),
        max_lora_rank=_number(lora, "max_lora_rank"),
        has_lora=bool(lora),
        data_parallel=_number(parallel, "data_parallel_size") or 1,
        api_servers=_number(parallel, "_api_process_count"),
        environment=_section(info, "vllm_env"),
    )


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _number(section: Mapping[str, Any], name: str) -> int | None:
    value = section.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Examiner(EngineClient):
    """Asks one thing at a time, so that one missing answer hides no other."""

    async def version(self) -> str:
        """The release, as GET /version reports it."""
        return str(read_field(await self._get("/version"), "version"))

    async def metrics(self) -> str:
        """The text of GET /metrics."""
        return await self._get("/metrics")

    async def serves_unknown(self, name: str) -> bool:
        """Whether a request for a model that does not exist is answered all the same."""
        return await self._answers({**_ONE_TOKEN, "model": name})

    async def serves_nameless(self) -> bool:
        """Whether a request without a model is answered: by the base model, in vLLM 0.32."""
        return await self._answers(_ONE_TOKEN)

    async def _answers(self, body: Mapping[str, Any]) -> bool:
        limit_s = self.timeouts.score_s
        try:
            await self._post("/v1/completions", "completion", limit_s, body)
        except (AdapterMissing, RequestRefused):
            return False
        return True


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
    if found.config is not None:
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
