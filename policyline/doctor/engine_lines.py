"""Judges what was measured of a vLLM server: is it one that a sidecar can serve versions with?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from policyline.doctor.engine_facts import EngineFindings, MetricsFacts
from policyline.doctor.model import Failure, Line, Window, failed, joined
from policyline.doctor.releases import RUN, parse_release, problems_of, shown

_ONE_EACH: Final = "run one vLLM server for each engine, with a sidecar of its own"
SLOW_S: Final = 5.0
"""A scored request of 16 tokens takes milliseconds; one behind a full batch takes seconds."""


def engine_lines(found: EngineFindings, window: Window) -> Iterator[Line]:
    """Everything about the server itself; nothing more when it does not answer."""
    if isinstance(found.version, Failure):
        yield failed("engine.reachable", found.version)
        if found.version.unreachable:
            return
    else:
        yield Line("pass", "engine.reachable", found.url)
        yield from _release(found.version)
    yield from _loading(found)
    yield _max_loras(found, window)
    yield _max_cpu_loras(found, window)
    yield from _topology(found)
    yield from _incarnation(found)


def _release(version: str) -> Iterator[Line]:
    release = parse_release(version)
    if release is None or release not in RUN:
        yield Line(
            "warn",
            "engine.version",
            f"{version} was not run with policyline",
            f"prefer one of {shown(RUN)}, which were; or run tests/contract against yours",
        )
    else:
        yield Line("pass", "engine.version", f"{version}, which policyline was run with")
    for problem in problems_of(release) if release is not None else ():
        what = f"{problem.what} ({problem.reference})"
        if problem.covered:
            yield Line("pass", "engine.known_problem", f"{what}: {problem.covered}", problem.remedy)
        else:
            yield Line("warn", "engine.known_problem", what, problem.remedy)


def _loading(found: EngineFindings) -> Iterator[Line]:
    name = "engine.runtime_lora"
    if isinstance(found.runtime_lora, Failure):
        yield failed(name, found.runtime_lora)
    elif found.runtime_lora is False:
        yield Line(
            "fail",
            name,
            "the load route does not exist",
            "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
        )
    elif found.lora_enabled is False:
        yield Line("fail", name, "LoRA is not enabled", "start vLLM with --enable-lora")
    elif found.lora_enabled is None:
        yield Line("warn", name, "the load route exists; whether LoRA is enabled was not seen")
    else:
        yield Line("pass", name, "allowed")
    if isinstance(found.server, Failure):
        yield failed("engine.dev_endpoints", found.server)
    elif found.server is not None:
        yield Line(
            "pass",
            "engine.dev_endpoints",
            "on",
            "let nobody else reach them: they take no API key",
        )
    else:
        yield Line(
            "warn",
            "engine.dev_endpoints",
            "off: the sidecar can neither read limits nor free an evicted adapter's memory",
            "start vLLM with VLLM_SERVER_DEV_MODE=1, on a private network only; optional",
        )


def _max_loras(found: EngineFindings, window: Window) -> Line:
    name, slots = "engine.max_loras", found.max_loras
    needed = f"max_staleness {window.max_staleness} ({window.source}) needs {window.slots}"
    remedy = f"start vLLM with --max-loras {window.slots} or more"
    if slots is None:
        return Line("warn", name, f"not reported; {needed}", f"make sure of it: {remedy}")
    if slots < window.slots:
        return Line("fail", name, f"{slots}; {needed}", remedy)
    return Line("pass", name, f"{slots}; {needed}")


def _max_cpu_loras(found: EngineFindings, window: Window) -> Line:
    name, room = "engine.max_cpu_loras", 2 * window.slots
    advice = f"start vLLM with --max-cpu-loras {room}, twice the window: unload frees nothing"
    config = found.config
    if config is None:
        return Line("warn", name, "not reported without dev endpoints", advice)
    if config.max_cpu_loras is None:
        return Line("skip", name, "not reported: LoRA is not enabled")
    # The development routes that report it also let the sidecar free what it evicts.
    return Line("pass", name, f"{config.max_cpu_loras}; the sidecar frees what it evicts")


def _topology(found: EngineFindings) -> Iterator[Line]:
    config = found.config
    metrics = found.metrics if isinstance(found.metrics, MetricsFacts) else None
    engines = max(
        config.data_parallel if config is not None else 0,
        metrics.engines if metrics is not None else 0,
    )
    if engines > 1:
        yield Line(
            "fail",
            "engine.data_parallel",
            f"{engines} engines behind one URL: a load is answered by one of them, and "
            "none reports what the others hold",
            _ONE_EACH,
        )
    elif engines == 1:
        yield Line("pass", "engine.data_parallel", "1 engine")
    else:
        yield Line("skip", "engine.data_parallel", "neither server_info nor metrics report it")
    yield _api_servers(found, metrics)


def _api_servers(found: EngineFindings, metrics: MetricsFacts | None) -> Line:
    name = "engine.api_servers"
    reported = None if found.config is None else found.config.api_servers
    starts = metrics.incarnations if metrics is not None else ()
    incarnations, total = len(set(starts)), len(starts)
    if (reported or 0) > 1:
        return Line(
            "fail",
            name,
            f"{reported} API servers, each with a registry of its own",
            "start vLLM with --api-server-count 1",
        )
    if incarnations > 1:
        return Line(
            "fail",
            name,
            f"{incarnations} different start times on {total} connections: several "
            "servers behind one URL, or one that restarts all the time",
            "give the URL of one server, not of a load balancer; " + _ONE_EACH,
        )
    if incarnations == 0:
        return Line("skip", name, "no start time in the metrics to tell servers apart")
    return Line("pass", name, "1: the same start time on every connection")


def _incarnation(found: EngineFindings) -> Iterator[Line]:
    name = "engine.incarnation"
    if isinstance(found.metrics, Failure):
        yield failed(name, found.metrics)
    elif found.metrics is not None and found.metrics.incarnations:
        yield Line("pass", name, f"process_start_time_seconds {found.metrics.incarnations[-1]}")
    elif found.metrics is not None:
        yield Line(
            "fail",
            name,
            "GET /metrics has no process_start_time_seconds, so a restart cannot be seen",
            "start one API server (--api-server-count 1), and unset PROMETHEUS_MULTIPROC_DIR",
        )
    yield _answers(found)


def _answers(found: EngineFindings) -> Line:
    name, scores = "engine.answers", found.scores_s
    if found.paused:
        return Line(
            "fail",
            name,
            "generation is paused, so no request is answered",
            f"resume it: curl -X POST {found.url}/resume; policyline ledger status shows whether "
            "the fleet is meant to be paused",
        )
    if isinstance(scores, Failure):
        hint = scores.hint or "restart vLLM: /health stays 200 while its worker hangs"
        return Line("fail", name, scores.cause, hint, unreachable=scores.unreachable)
    if scores is None:
        return Line("skip", name, "no model to ask")
    first, last = scores[0], scores[-1]
    value = f"{1000 * last:.1f} ms for 16 tokens (first {1000 * first:.1f} ms)"
    if last > SLOW_S:
        return Line("warn", name, value, "see whether the server is overloaded or swapping")
    return Line("pass", name, value)


def cache_line(found: EngineFindings, cache: str) -> Line:
    """Whether the engine reads the sidecar's local copies; only where --cache was given."""
    name = "engine.reads_cache"
    if found.cache_access == "reads":
        return Line("pass", name, f"{cache} (seen by one load that fails on purpose)")
    if found.cache_access == "does not see":
        return Line(
            "fail",
            name,
            f"the engine finds no files in {cache}",
            "choose a --cache on a disk that vLLM sees under the same path (in containers: the "
            "same volume under the same path)",
        )
    if isinstance(found.cache_access, Failure):
        return failed(name, found.cache_access)
    return Line("skip", name, "adapters cannot be loaded")


def others_line(found: EngineFindings, window: Window, others: list[str]) -> Iterator[Line]:
    """Adapters that are none of the line's: they take slots."""
    if not others:
        return
    slots, name = found.max_loras, "engine.other_adapters"
    if slots is None or slots >= window.slots + len(others):
        yield Line("pass", name, joined(others))
        return
    yield Line(
        "warn",
        name,
        f"{joined(others)}: with them {window.slots + len(others)} slots are wanted, there are "
        f"{slots}",
        f"start vLLM with --max-loras {window.slots + len(others)}",
    )
