"""What is said of names: whose adapters a server holds, and what else answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policyline.doctor.identity_lines import Identity, identity_lines, other_adapters
from policyline.doctor.model import Failure, Status
from policyline.watcher.vllm.answers import EngineBaseModel, EngineModels
from tests.unit.doctor.builders import CONFIG, ENGINE, MODELS, URL, by_name, with_adapters

LEDGER_ID = "a" * 32
DIGEST = "b" * 64
OURS = Identity("trl-policy", LEDGER_ID, {7: DIGEST})
COPY = f"/cache/{LEDGER_ID}/trl-policy-v7-{DIGEST[:16]}"


def test_a_healthy_server_passes_everything() -> None:
    assert {line.status for line in identity_lines(ENGINE, OURS)} == {"pass", "note"}


@pytest.mark.parametrize(
    ("adapters", "identity", "status", "value"),
    [
        ((), OURS, "pass", "none"),
        ((("other", "/x"),), OURS, "pass", "none"),
        ((("trl-policy-v7", COPY),), OURS, "pass", "1 of this ledger"),
        ((("trl-policy-v7", f"/static/trl-policy-v7-{DIGEST[:16]}"),), OURS, "fail", "/static"),
        ((("trl-policy-v8", COPY.replace("v7", "v8")),), OURS, "fail", "another ledger or hand"),
        ((("trl-policy-v7", COPY),), Identity("trl-policy"), "fail", "somebody loaded"),
        ((("trl-policy-v7", COPY),), Identity("other-line"), "pass", "none"),
    ],
)
def test_whose_adapters_are_under_the_line(
    adapters: tuple[tuple[str, str], ...], identity: Identity, status: Status, value: str
) -> None:
    found = replace(ENGINE, models=with_adapters(*adapters))
    line = by_name(identity_lines(found, identity))["engine.adapters"]

    assert (line.status, value in line.value) == (status, True)


def test_what_to_do_about_foreign_adapters_is_said_exactly() -> None:
    found = replace(ENGINE, models=with_adapters(("trl-policy-v3", "/old"), ("trl-policy-v4", "/")))
    remedy = by_name(identity_lines(found, OURS))["engine.adapters"].remedy

    for part in ("restart vLLM", "--lora-modules", "--take-over", "another --line", "for each"):
        assert part in remedy
    assert (
        f"curl -X POST {URL}/v1/unload_lora_adapter -H 'Content-Type: application/json' -d "
        '\'{"lora_name": "trl-policy-v3"}\''
    ) in remedy
    unknown = by_name(identity_lines(found, Identity("trl-policy")))["engine.adapters"].remedy
    assert unknown.startswith("give --ledger")


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, "pass"),
        ({"VLLM_LORA_RESOLVER_CACHE_DIR": "/x"}, "fail"),
        ({"VLLM_LORA_RESOLVER_CACHE_DIR": "/x", "VLLM_PLUGINS": ["something"]}, "pass"),
        (
            {"VLLM_LORA_RESOLVER_CACHE_DIR": "/x", "VLLM_PLUGINS": ["lora_filesystem_resolver"]},
            "fail",
        ),
        ({"VLLM_PLUGINS": ["lora_filesystem_resolver"]}, "pass"),
        ({"VLLM_LORA_RESOLVER_HF_REPO_LIST": "a/b"}, "pass"),
        (
            {"VLLM_LORA_RESOLVER_HF_REPO_LIST": "a/b", "VLLM_PLUGINS": ["lora_hf_hub_resolver"]},
            "fail",
        ),
    ],
)
def test_resolvers_are_refused(environment: dict[str, Any], status: Status) -> None:
    found = replace(ENGINE, server=replace(CONFIG, environment=environment))

    assert by_name(identity_lines(found, OURS))["engine.resolvers"].status == status


def test_without_dev_endpoints_resolvers_are_not_reported() -> None:
    found = replace(ENGINE, server=None)

    assert by_name(identity_lines(found, OURS))["engine.resolvers"].status == "skip"


@pytest.mark.parametrize(
    ("changes", "name", "status", "text"),
    [
        ({"unknown_served": True}, "unknown_names", "fail", "VLLM_SKIP_MODEL_NAME_VALIDATION"),
        ({"unknown_served": None}, "unknown_names", "skip", ""),
        ({"unknown_served": Failure("500")}, "unknown_names", "fail", ""),
        ({"nameless_served": True}, "nameless", "note", "name a version"),
        ({"nameless_served": False}, "nameless", "pass", ""),
        ({"nameless_served": Failure("500", "see its log")}, "nameless", "fail", "see its log"),
        ({"models": Failure("401", "the key")}, "models", "fail", "the key"),
    ],
)
def test_what_answers_for_other_names(
    changes: dict[str, Any], name: str, status: Status, text: str
) -> None:
    line = by_name(identity_lines(replace(ENGINE, **changes), OURS))[f"engine.{name}"]

    assert (line.status, text in line.remedy) == (status, True)


@pytest.mark.parametrize(
    ("base", "identity", "status"),
    [
        (MODELS.base, Identity("l", base_model="/models/tiny/"), "pass"),
        (MODELS.base, Identity("l", adapter_base="tiny"), "pass"),
        (MODELS.base, Identity("l", base_model="/models/tiny", adapter_base="Org/Tiny"), "pass"),
        (MODELS.base, Identity("l", base_model="/models/large"), "warn"),
        (MODELS.base, Identity("l"), "pass"),
        (EngineBaseModel("tiny", "/models/tiny", 16), Identity("l"), "fail"),
        (EngineBaseModel("tiny", "/models/tiny", None), Identity("l"), "pass"),
    ],
)
def test_the_base_model_is_the_expected_one(
    base: EngineBaseModel, identity: Identity, status: Status
) -> None:
    found = replace(ENGINE, models=EngineModels(base, ()))

    assert by_name(identity_lines(found, identity))["engine.base_model"].status == status


def test_adapters_that_are_none_of_the_line() -> None:
    found = replace(ENGINE, models=with_adapters(("trl-policy-v1", "/"), ("sql", "/")))

    assert other_adapters(found, "trl-policy") == ["sql"]
    assert other_adapters(replace(ENGINE, models=None), "trl-policy") == []
