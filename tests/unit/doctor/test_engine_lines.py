"""What is said of a server, by table: one finding each is other than healthy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policyline.doctor.engine_lines import cache_line, engine_lines, others_line
from policyline.doctor.model import Failure, Status, Window
from tests.unit.doctor.builders import CONFIG, ENGINE, METRICS, WINDOW, by_name

SILENT = Failure("no answer within 30 s", unreachable=True)
REFUSED = Failure("wrong key", "give the key")


def test_a_healthy_server_passes_everything() -> None:
    lines = list(engine_lines(ENGINE, WINDOW))

    assert {line.status for line in lines} == {"pass"}
    assert not any(line.unreachable for line in lines)


def test_a_server_that_does_not_answer_is_one_line() -> None:
    (line,) = engine_lines(replace(ENGINE, version=SILENT), WINDOW)

    assert (line.status, line.name, line.unreachable) == ("fail", "engine.reachable", True)


@pytest.mark.parametrize(
    ("changes", "name", "status", "value", "remedy"),
    [
        ({"version": "0.33.0"}, "version", "warn", "not run", "0.32.0"),
        ({"version": "0.27.1"}, "version", "pass", "run with", ""),
        ({"version": "0.32.0+cpu"}, "version", "pass", "run with", ""),
        ({"version": "0.32.1.dev5+g12"}, "version", "warn", "not run", "0.32.0"),
        ({"version": REFUSED}, "reachable", "fail", "wrong key", "give the key"),
        ({"runtime_lora": False}, "runtime_lora", "fail", "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"lora_enabled": False}, "runtime_lora", "fail", "not enabled", "--enable-lora"),
        ({"lora_enabled": None}, "runtime_lora", "warn", "not seen", ""),
        ({"runtime_lora": REFUSED}, "runtime_lora", "fail", "wrong key", "give the key"),
        (
            {"server": None},
            "dev_endpoints",
            "warn",
            "off",
            "VLLM_SERVER_DEV_MODE=1",
        ),
        (
            {"server": None},
            "max_cpu_loras",
            "warn",
            "not reported",
            "--max-cpu-loras 12",
        ),
        ({"server": REFUSED}, "dev_endpoints", "fail", "wrong key", ""),
        ({"server": replace(CONFIG, max_loras=5)}, "max_loras", "fail", "5;", "--max-loras 6"),
        (
            {"server": None, "metrics": replace(METRICS, max_loras=None)},
            "max_loras",
            "warn",
            "not reported",
            "--max-loras 6",
        ),
        ({"server": None}, "max_loras", "pass", "6;", ""),
        ({"server": replace(CONFIG, data_parallel=2)}, "data_parallel", "fail", "2 engines", "one"),
        ({"metrics": replace(METRICS, engines=4)}, "data_parallel", "fail", "4 engines", "one"),
        (
            {"server": None, "metrics": replace(METRICS, engines=0)},
            "data_parallel",
            "skip",
            "report",
            "",
        ),
        (
            {"server": replace(CONFIG, api_servers=3)},
            "api_servers",
            "fail",
            "3 API",
            "--api-server-count 1",
        ),
        (
            {"metrics": replace(METRICS, incarnations=("1.0", "2.0", "1.0", "2.0"))},
            "api_servers",
            "fail",
            "2 different start times on 4 connections",
            "load balancer",
        ),
        ({"metrics": replace(METRICS, incarnations=())}, "api_servers", "skip", "", ""),
        (
            {"metrics": replace(METRICS, incarnations=())},
            "incarnation",
            "fail",
            "process_start_time_seconds",
            "--api-server-count 1",
        ),
        ({"metrics": REFUSED}, "incarnation", "fail", "wrong key", "give the key"),
        ({"paused": True, "scores_s": None}, "answers", "fail", "paused", "/resume"),
        ({"scores_s": SILENT}, "answers", "fail", "no answer", "restart vLLM"),
        ({"scores_s": None}, "answers", "skip", "", ""),
        ({"scores_s": (17.3, 0.015)}, "answers", "pass", "15.0 ms for 16 tokens (first 17300", ""),
        ({"scores_s": (17.3, 6.0)}, "answers", "warn", "6000", "overloaded"),
    ],
)
def test_each_finding_has_its_line(
    changes: dict[str, Any], name: str, status: Status, value: str, remedy: str
) -> None:
    line = by_name(engine_lines(replace(ENGINE, **changes), WINDOW))[f"engine.{name}"]

    assert line.status == status
    assert value in line.value
    assert remedy in line.remedy


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", {"vllm#54839": "pass", "vllm#41482": "pass"}),
        ("0.31.0", {"vllm#54839": "pass", "vllm#41482": "pass", "PiSSA": "pass"}),
        (
            "0.27.1",
            {
                "vllm#54839": "pass",
                "vllm#41482": "pass",
                "PiSSA": "pass",
                "kv_cache_utils": "pass",
            },
        ),
        (
            "0.26.0",
            {
                "vllm#54839": "pass",
                "vllm#41482": "pass",
                "PiSSA": "pass",
                "kv_cache_utils": "pass",
                "vllm#47724": "warn",
            },
        ),
        ("main", {}),
    ],
)
def test_known_problems_of_a_release(version: str, expected: dict[str, Status]) -> None:
    lines = engine_lines(replace(ENGINE, version=version), WINDOW)
    problems = [line for line in lines if line.name == "engine.known_problem"]

    assert len(problems) == len(expected)
    for reference, status in expected.items():
        (line,) = (line for line in problems if reference in line.value)
        assert line.status == status


def test_the_window_decides_how_many_slots_are_needed() -> None:
    assert by_name(engine_lines(ENGINE, Window(5, "run 'r'")))["engine.max_loras"].status == "fail"
    assert by_name(engine_lines(ENGINE, Window(0, "run 'r'")))["engine.max_loras"].status == "pass"


@pytest.mark.parametrize(
    ("sight", "status", "text"),
    [
        ("reads", "pass", "/cache"),
        ("does not see", "fail", "/cache"),
        (Failure("[Errno 13] Permission denied"), "fail", "Errno 13"),
        (None, "skip", "cannot be loaded"),
    ],
)
def test_whether_the_engine_reads_the_cache(sight: Any, status: Status, text: str) -> None:
    line = cache_line(replace(ENGINE, cache_access=sight), "/cache")

    assert (line.status, text in line.value) == (status, True)


def test_adapters_of_others_take_slots() -> None:
    assert list(others_line(ENGINE, WINDOW, [])) == []
    (short,) = others_line(ENGINE, WINDOW, ["a", "b"])
    assert (short.status, "--max-loras 8" in short.remedy) == ("warn", True)
    (enough,) = others_line(ENGINE, Window(2, ""), ["a", "b"])
    assert enough.status == "pass"
