"""What was measured of a vLLM server, and how it is read from its answers; no I/O here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from policyline.doctor.model import Failure
from policyline.watcher.vllm.answers import EngineModels, read_incarnation
from policyline.watcher.vllm.errors import EngineFault


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
    dev_endpoints: bool | None = None
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
