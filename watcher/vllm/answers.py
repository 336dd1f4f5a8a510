"""The engine's answers as frozen values, and how they are parsed; no I/O here."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from policyline.watcher.vllm.errors import EngineFault, NonFinite


@dataclass(frozen=True, slots=True)
class EngineBaseModel:
    """The model the server was started with."""

    name: str
    root: str
    """Path or hub name, as given to vLLM."""
    max_model_len: int | None
    """Longest prompt and completion together, in tokens."""


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """One entry of the server's registry; it says nothing about residency in the worker."""

    name: str
    path: str
    """The path exactly as it was given in the load call."""


@dataclass(frozen=True, slots=True)
class EngineModels:
    """The registry: the base model and the adapters, in the order of their loading."""

    base: EngineBaseModel
    adapters: tuple[EngineAdapter, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One observation of the engine."""

    incarnation: str
    """Start time of the process as printed in its metrics; it changes with every restart."""
    models: EngineModels
    busy: frozenset[str] | None
    """Names of the adapters with a request in the engine; None when unknown.

    Only a step of the engine moves it. So it says nothing of an engine that is paused or stands
    still, and goes on naming a request whose client left until some other request runs."""
    stepped: str = ""
    """Changes when the engine has emitted something; empty before the first time."""
    max_loras: int | None = None
    """Adapter slots, as the metrics report them from the first output on; None before."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How the server was started. None: the server does not report it."""

    version: str
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None
    block_size: int | None
    """Tokens in one block of the prefix cache."""
    max_num_seqs: int | None
    served_model_names: tuple[str, ...]
    dev_endpoints: bool
    runtime_lora: bool | None
    """Whether adapters can be loaded at run time."""
    build: str
    """Equal for two servers that should give equal log-probabilities, as far as they report."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one completion."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion."""

    model: str
    """The name that answered, as the engine echoes it."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """`length`, `stop` or `abort` (cut short by a pause in mode `abort`)."""
    usage: Usage


_START_TIME = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_LORA_SERIES = re.compile(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", re.MULTILINE)
_WAITING = re.compile(r"^vllm:num_requests_waiting\{.*\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_COUNT = re.compile(r"[0-9]{1,9}")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
METRICS: Final = (
    "process_start_time_seconds",
    "vllm:lora_requests_info",
    "vllm:num_requests_waiting",
)
"""The metrics that are parsed here."""


def has_incarnation(metrics: str) -> bool:
    """Whether the text contains the process start time."""
    return _START_TIME.search(metrics) is not None


def read_incarnation(metrics: str) -> str:
    """Return the process start time as printed in the text of GET /metrics."""
    found = _START_TIME.search(metrics)
    if found is None:
        raise EngineFault("GET /metrics has no process_start_time_seconds")
    return found.group(1)


def read_busy(metrics: str) -> frozenset[str] | None:
    """Return the names in the newest `vllm:lora_requests_info` series; None when unknown.

    vLLM 0.32 never removes a series; its value is the time of its last update, so the newest has
    the largest. A name is shown from its request's first output on. So the names are unknown
    where there is no series yet, and while any request waits for a slot in the batch.
    """
    if any(_number(value) > 0 for value in _WAITING.findall(metrics)):
        return None
    newest = _newest_series(metrics)
    if newest is None:
        return None
    values = {name: _unescape(value) for name, value in _LABEL.findall(newest[0])}
    names = ",".join(
        values.get(label, "") for label in ("running_lora_adapters", "waiting_lora_adapters")
    )
    return frozenset(name for name in names.split(",") if name)


def read_stepped(metrics: str) -> str:
    """Return the time of the last update of `vllm:lora_requests_info`, as it is printed.

    vLLM 0.32 renews it whenever the engine emits outputs, of whichever model.
    """
    newest = _newest_series(metrics)
    return "" if newest is None else newest[1]


def read_max_loras(metrics: str) -> int | None:
    """Return the slots that `vllm:lora_requests_info` names; None without a series.

    vLLM 0.32 reports them there without development endpoints, from the first output on.
    """
    newest = _newest_series(metrics)
    labels = {} if newest is None else dict(_LABEL.findall(newest[0]))
    slots = labels.get("max_lora", "")
    return int(slots) if _COUNT.fullmatch(slots) else None


def _newest_series(metrics: str) -> tuple[str, str] | None:
    """Labels and value of the `vllm:lora_requests_info` series with the largest value."""
    series: list[tuple[str, str]] = _LORA_SERIES.findall(metrics)
    return max(reversed(series), key=lambda found: _number(found[1]), default=None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise EngineFault(f"GET /metrics has {text!r:.40} where a number is due") from error


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match.group(1) == "n" else match.group(1), value)


def read_models(content: Any) -> EngineModels:
    """Return the registry from the answer of GET /v1/models.

    In vLLM 0.32 an adapter has the base model's name as `parent` and its path as `root`; the base
    has no parent. A server with several served names lists one entry for each: the first counts.
    """
    try:
        cards = content["data"]
        base = next(card for card in cards if card.get("parent") is None)
        return EngineModels(
            base=EngineBaseModel(str(base["id"]), str(base["root"]), _length(base)),
            adapters=tuple(
                EngineAdapter(str(card["id"]), str(card["root"]))
                for card in cards
                if card.get("parent") is not None
            ),
        )
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise EngineFault("GET /v1/models gave something else than vLLM's list") from error


def _length(card: Mapping[str, Any]) -> int | None:
    found = card.get("max_model_len")
    return found if isinstance(found, int) else None


def read_scores(content: Any, count: int) -> tuple[float, ...]:
    """Return the log-probabilities of a prompt's tokens but the first, `count` of them.

    Each entry of vLLM's `prompt_logprobs` maps token id to its figures; with `prompt_logprobs=0`
    it holds the prompt's own token alone.
    """
    try:
        entries = content["choices"][0]["prompt_logprobs"][1:]
        scores = tuple(float(figure["logprob"]) for (figure,) in (e.values() for e in entries))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise EngineFault("the completion has no prompt_logprobs") from error
    if len(scores) != count:
        raise EngineFault(f"{len(scores)} prompt log-probabilities where {count} were due")
    if not all(map(math.isfinite, scores)):
        raise NonFinite("a prompt log-probability is not finite")
    return scores


def read_completion(content: Any) -> Completion:
    """Return the first choice of a completion made with `return_token_ids`."""
    try:
        choice = content["choices"][0]
        usage = content["usage"]
        return Completion(
            model=content["model"],
            text=choice["text"],
            token_ids=tuple(choice["token_ids"] or ()),
            finish_reason=choice["finish_reason"],
            usage=Usage(usage["prompt_tokens"], usage["completion_tokens"]),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise EngineFault("the answer is not a completion") from error


def read_info(
    version: str, server: Mapping[str, Any] | None, models: EngineModels, *, runtime_lora: bool
) -> EngineInfo:
    """Return how the server was started.

    Args:
        version: from GET /version.
        server: the answer of GET /server_info?config_format=json; None where the route is missing.
        models: the registry.
        runtime_lora: whether the load route exists.
    """
    config = _section(server or {}, "vllm_config")
    lora = _section(config, "lora_config")
    names = _section(config, "model_config").get("served_model_name") or models.base.name
    return EngineInfo(
        version=version,
        max_loras=lora.get("max_loras"),
        max_cpu_loras=lora.get("max_cpu_loras"),
        max_lora_rank=lora.get("max_lora_rank"),
        block_size=_section(config, "cache_config").get("block_size"),
        max_num_seqs=_section(config, "scheduler_config").get("max_num_seqs"),
        served_model_names=(names,) if isinstance(names, str) else tuple(names),
        dev_endpoints=server is not None,
        runtime_lora=runtime_lora and (server is None or bool(lora)),
        build=_build(version, config),
    )


_NUMERIC_SETTINGS = (
    ("model_config", "dtype"),
    ("model_config", "quantization"),
    ("model_config", "enforce_eager"),
    ("model_config", "logprobs_mode"),
    ("cache_config", "cache_dtype"),
    ("device_config", "device"),
    ("parallel_config", "tensor_parallel_size"),
    ("parallel_config", "pipeline_parallel_size"),
    ("attention_config", "backend"),
    ("lora_config", "lora_dtype"),
)
"""The settings of vLLM's configuration that change its arithmetic."""


def _build(version: str, config: Mapping[str, Any]) -> str:
    settings = ",".join(
        f"{name}={value}"
        for section, name in _NUMERIC_SETTINGS
        if (value := _section(config, section).get(name)) is not None
    )
    return f"vllm {version} ({settings or 'settings unknown'})"


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def read_results(content: Any) -> list[Any]:
    """Return the results, one for each worker, of POST /collective_rpc."""
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise EngineFault("POST /collective_rpc gave no results")
    return results


def read_json(text: str) -> Any:
    """Return the parsed answer; NaN in it is as unreadable as any other broken JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineFault(f"the answer is not JSON: {text}") from error


def read_field(text: str, name: str) -> Any:
    """Return one field of a JSON object."""
    content = read_json(text)
    if not isinstance(content, dict) or name not in content:
        raise EngineFault(f"the answer has no {name!r}: {text}")
    return content[name]
