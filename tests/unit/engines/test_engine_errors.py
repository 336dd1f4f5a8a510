"""What an answer of the engine means: the texts of vLLM 0.32, with their statuses."""

import json

import pytest

from policyline.watcher.vllm.errors import (
    MESSAGE_LIMIT,
    AdapterAlreadyLoaded,
    AdapterMissing,
    AdapterRefused,
    EngineDead,
    EngineError,
    EngineFault,
    EngineUnauthorized,
    NonFinite,
    RequestRefused,
    Route,
    RouteMissing,
    RuntimeLoraDisabled,
    classify,
)


def error(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "x", "param": None, "code": 500}})


def failed(cause: str) -> str:
    return error(
        f"Call to add_lora method failed: Worker failed with error '{cause}', please check the "
        "stack trace above for the root cause"
    )


NOT_FOUND = '{"detail":"Not Found"}'

CASES: list[tuple[Route, int, str, type[EngineError]]] = [
    ("plain", 401, '{"error":"Unauthorized"}', EngineUnauthorized),
    ("load", 401, '{"error":"Unauthorized"}', EngineUnauthorized),
    ("load", 404, NOT_FOUND, RuntimeLoraDisabled),
    ("unload", 404, NOT_FOUND, RuntimeLoraDisabled),
    ("dev", 404, NOT_FOUND, RouteMissing),
    ("completion", 404, NOT_FOUND, RouteMissing),
    ("plain", 404, "<html>nginx</html>", RouteMissing),
    ("load", 400, error("The lora adapter 'a' has already been loaded. If"), AdapterAlreadyLoaded),
    ("load", 404, error("Loading lora a failed: No adapter found for <path>"), AdapterRefused),
    ("load", 400, error("1 validation error:\n  {}"), AdapterRefused),
    ("load", 400, error("something new"), AdapterRefused),
    ("load", 500, failed("LoRA rank 16 is greater than max_lora_rank 8."), AdapterRefused),
    ("load", 500, failed("LoRA is not enabled. Use --enable-lora"), RuntimeLoraDisabled),
    ("load", 500, failed("All items are pinned, cannot remove oldest"), EngineFault),
    ("load", 500, failed("[Errno 5] Input/output error"), EngineFault),
    ("load", 500, error("EngineCore encountered an issue. See"), EngineDead),
    ("unload", 404, error("The lora adapter 'a' cannot be found."), AdapterMissing),
    ("completion", 404, error("The model `a` does not exist."), AdapterMissing),
    ("completion", 400, error("Out of range float values are not JSON compliant"), NonFinite),
    ("completion", 400, error("max_tokens must be at least 1, got 0."), RequestRefused),
    ("completion", 500, error("EngineCore encountered an issue."), EngineDead),
    ("completion", 503, "", EngineDead),
    ("completion", 502, "Bad Gateway", EngineFault),
    ("completion", 429, "", RequestRefused),
    ("dev", 500, error("Pinning failed."), EngineFault),
    ("dev", 405, '{"detail":"Method Not Allowed"}', RequestRefused),
]


@pytest.mark.parametrize(("route", "status", "body", "kind"), CASES)
def test_classify(route: Route, status: int, body: str, kind: type[EngineError]) -> None:
    found = classify(route, status, body)

    assert type(found) is kind
    assert found.status == status


def test_every_kind_has_a_case() -> None:
    answered = {kind for *_, kind in CASES}

    assert {kind.__name__ for kind in set(EngineError.__subclasses__()) - answered} == {
        "EngineUnreachable",
        "EngineTimeout",
        "EngineHangs",
    }, "these three are no answers"


def test_a_long_message_keeps_both_ends() -> None:
    found = classify("load", 500, failed("x" * 5000 + " the cause"))

    assert len(found.message) <= MESSAGE_LIMIT
    assert found.message.startswith("Call to add_lora")
    assert found.message.endswith("for the root cause")


@pytest.mark.parametrize("body", ["", "null", "[]", "7", '{"error":null}', '{"error":{}}', "\x00"])
def test_a_strange_body_is_still_an_error(body: str) -> None:
    for route in ("load", "unload", "completion", "plain", "dev"):
        for status in (400, 404, 500, 503):
            assert isinstance(classify(route, status, body), EngineError)
