"""Judges names: which adapters and models a server answers for, and who put them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from policyline.doctor.engine_facts import EngineFindings
from policyline.doctor.model import Failure, Line, failed, joined
from policyline.ledger.names import parse_policy_name
from policyline.watcher.vllm.answers import EngineAdapter, EngineModels

LONGEST_PROBE: Final = 17
"""Tokens of a probe: 16 of the prompt and one generated."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the names should be."""

    line: str
    ledger_id: str | None = None
    """None where no ledger was given or it did not answer."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Version -> digest, of the ledger, for the versions that the server lists."""
    base_model: str | None = None
    """The base model's directory or hub name, if one was given."""
    adapter_base: str | None = None
    """What the adapter's configuration names as its base."""

    def published(self, adapter: EngineAdapter) -> bool:
        """Whether an adapter is a local copy of a version of this ledger."""
        version = parse_policy_name(self.line, adapter.name)
        digest = None if version is None else self.digests.get(version)
        return digest is not None and adapter.path.endswith(
            f"/{self.ledger_id}/{adapter.name}-{digest[:16]}"
        )


def identity_lines(found: EngineFindings, wanted: Identity) -> Iterator[Line]:
    """Everything about names; nothing when the registry could not be read."""
    models = found.models
    if isinstance(models, Failure):
        yield failed("engine.models", models)
    if not isinstance(models, EngineModels):
        return
    yield _base_model(models, wanted)
    yield _adapters(found, models, wanted)
    yield _resolvers(found)
    yield _unknown_names(found)
    yield from _nameless(found)


def other_adapters(found: EngineFindings, line: str) -> list[str]:
    """Names of the adapters that are none of the line's."""
    if not isinstance(found.models, EngineModels):
        return []
    return [a.name for a in found.models.adapters if parse_policy_name(line, a.name) is None]


def _base_model(models: EngineModels, wanted: Identity) -> Line:
    name, base = "engine.base_model", models.base
    value = f"{base.name} from {base.root}"
    if base.max_model_len is not None:
        value += f", {base.max_model_len} tokens"
        if base.max_model_len < LONGEST_PROBE:
            return Line("fail", name, value, f"start vLLM with --max-model-len {LONGEST_PROBE} up")
    expected = {text.rstrip("/") for text in (wanted.base_model, wanted.adapter_base) if text}
    if expected and not expected & {base.root.rstrip("/"), base.name}:
        return Line(
            "warn",
            name,
            f"{value}; expected {joined(sorted(expected))}",
            "make sure that they are the same weights: vLLM does not compare",
        )
    return Line("pass", name, value)


def _adapters(found: EngineFindings, models: EngineModels, wanted: Identity) -> Line:
    name = "engine.adapters"
    ours = [a for a in models.adapters if parse_policy_name(wanted.line, a.name) is not None]
    foreign = [a for a in ours if not wanted.published(a)]
    if not ours:
        return Line("pass", name, f"none under line {wanted.line!r}")
    if not foreign:
        return Line("pass", name, f"{len(ours)} of this ledger: {joined([a.name for a in ours])}")
    shown = joined([f"{a.name} from {a.path}" for a in foreign], most=2)
    whose = "another ledger or hand loaded" if wanted.ledger_id else "somebody loaded"
    return Line(
        "fail",
        name,
        f"{whose} {shown}: a sidecar does not load a version whose name is taken",
        _how_to_free(found.url, [a.name for a in foreign], wanted),
    )


def _how_to_free(url: str, names: list[str], wanted: Identity) -> str:
    body = f'{{"lora_name": "{names[0]}"}}'
    unload = (
        f"curl -X POST {url}/v1/unload_lora_adapter -H 'Content-Type: application/json' -d '{body}'"
    )
    each = unload if len(names) == 1 else f"{unload}, and so for each"
    choices = [
        "when nobody uses them: restart vLLM (without them in --lora-modules)",
        f"or run the sidecar with --take-over; or unload by hand ({each})",
        "or publish under another --line",
    ]
    if wanted.ledger_id is None:
        choices.insert(0, "give --ledger, to see whether they are its own")
    return "; ".join(choices)


def _resolvers(found: EngineFindings) -> Line:
    name = "engine.resolvers"
    if found.config is None:
        return Line("skip", name, "not reported without dev endpoints")
    active = list(_active_resolvers(found.config.environment))
    if not active:
        return Line("pass", name, "none configured")
    return Line(
        "fail",
        name,
        f"{' and '.join(active)}: any request loads what it names, and an evicted version comes "
        "back",
        "start vLLM without VLLM_LORA_RESOLVER_CACHE_DIR and VLLM_LORA_RESOLVER_HF_REPO_LIST",
    )


def _active_resolvers(environment: Mapping[str, Any]) -> Iterator[str]:
    """VLLM 0.32: an unset VLLM_PLUGINS loads every plugin, but the hub's must be named."""
    plugins = environment.get("VLLM_PLUGINS")
    directory = environment.get("VLLM_LORA_RESOLVER_CACHE_DIR")
    repositories = environment.get("VLLM_LORA_RESOLVER_HF_REPO_LIST")
    if directory and (plugins is None or "lora_filesystem_resolver" in plugins):
        yield f"the filesystem resolver of {directory}"
    if repositories and plugins is not None and "lora_hf_hub_resolver" in plugins:
        yield f"the hub resolver of {repositories}"


def _unknown_names(found: EngineFindings) -> Line:
    name = "engine.unknown_names"
    served = found.unknown_served
    if isinstance(served, Failure):
        return failed(name, served)
    if served is None:
        return Line("skip", name, "not asked, as the server answers no request")
    if served:
        return Line(
            "fail",
            name,
            "a request for a name that does not exist is answered by the base model: a lost "
            "version would go unnoticed",
            "start vLLM without VLLM_SKIP_MODEL_NAME_VALIDATION",
        )
    return Line("pass", name, "refused")


def _nameless(found: EngineFindings) -> Iterator[Line]:
    served, name = found.nameless_served, "engine.nameless"
    if isinstance(served, Failure):
        yield failed(name, served)
    elif served:
        yield Line(
            "note",
            name,
            "a request without a model is answered by the base model, as vLLM does",
            "let clients name a version in every request",
        )
    elif served is not None:
        yield Line("pass", name, "a request without a model is refused")
