"""The bodies of the double's answers, with vLLM 0.32's fields, and how its requests are read."""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from policyline.engines.simulated import language
from policyline.engines.simulated.engine import SimulatedRequest
from policyline.engines.simulated.service import CallRefused, Service, ServiceOptions
from policyline.engines.simulated.worker import Adapter

VERSION = "0.32.0"
BAD = "BadRequestError"


_ABSOLUTE_PATH = re.compile(r"/(?:home|lib|mnt|opt|root|srv|tmp|usr|var)/[\w./-]+")


def error_body(refused: CallRefused) -> dict[str, Any]:
    """Return vLLM's error body, in which paths under the usual roots are hidden."""
    return {
        "error": {
            "message": _ABSOLUTE_PATH.sub("<path>", refused.message),
            "type": refused.kind,
            "param": refused.param,
            "code": refused.status,
        }
    }


def parse_object(content_type: str, body: bytes) -> dict[str, Any]:
    """Return the request's JSON object, or refuse it with the text of vLLM's validation."""
    if content_type.lower().split(";", maxsplit=1)[0] != "application/json":
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        content = json.loads(body)
    except ValueError as error:
        fault = {
            "type": "json_invalid",
            "loc": "body.0",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": str(error).split(":", maxsplit=1)[0]},
        }
        raise invalid(str(fault), "body.0") from error
    if not isinstance(content, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        shown = f"<{type(content).__name__} of {len(content)} items>" if content else str(content)
        fault = {"type": "model_attributes_type", "loc": "body", "msg": text, "input": shown}
        raise invalid(str(fault), "body")
    return content


def require_strings(content: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the named fields, or refuse the request where one is missing or no string."""
    faults = []
    for name in names:
        fault = {"type": "missing", "loc": f"body.{name}", "msg": "Field required"}
        if name not in content:
            faults.append({**fault, "input": f"<dict of {len(content)} items>"})
        elif not isinstance(content[name], str):
            text = "Input should be a valid string"
            fault = {**fault, "type": "string_type", "msg": text, "input": str(content[name])}
            faults.append(fault)
    if faults:
        raise invalid("\n  ".join(map(str, faults)), faults[0]["loc"], len(faults))
    return [content[name] for name in names]


def invalid(detail: str, param: str | None = None, count: int = 1) -> CallRefused:
    """Return the refusal of a request that fails validation."""
    errors = "error" if count == 1 else "errors"
    return CallRefused(400, "Bad Request", f"{count} validation {errors}:\n  {detail}", param)


def models_body(options: ServiceOptions, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Return the registry as GET /v1/models shows it: `created` is the time of the call."""
    base = _card(options.served_model_name, options.model, None, options.engine.max_model_len)
    cards = [_card(a.name, a.path, options.served_model_name, None) for a in adapters]
    return {"object": "list", "data": [base, *cards]}


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def server_info_body(options: ServiceOptions) -> dict[str, Any]:
    """Return the part of GET /server_info?config_format=json that clients look at."""
    engine = options.engine
    lora = {
        "max_lora_rank": engine.max_lora_rank,
        "max_loras": engine.max_loras,
        "max_cpu_loras": engine.cpu_slots,
        "lora_dtype": "torch.bfloat16",
        "target_modules": None,
    }
    config = {
        "model_config": {
            "model": options.model,
            "dtype": "torch.bfloat16",
            "max_model_len": engine.max_model_len,
            "served_model_name": options.served_model_name,
            "logprobs_mode": "processed_logprobs",
        },
        "cache_config": {"block_size": engine.block_size, "enable_prefix_caching": True},
        "parallel_config": {
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
        },
        "scheduler_config": {"max_num_seqs": engine.max_num_seqs},
        "device_config": {"device": "simulated"},
        "lora_config": lora if options.enable_lora else None,
    }
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": options.runtime_lora,
        "VLLM_SERVER_DEV_MODE": options.dev_mode,
    }
    return {"vllm_config": config, "vllm_env": environment}


def metrics_text(service: Service) -> str:
    """Return GET /metrics: the series of vLLM's that concern adapters and load."""
    engine, name = service.engine, service.options.served_model_name
    labels = f'engine="0",model_name="{name}"'
    slots = service.options.engine.max_loras
    lines = [
        f"process_start_time_seconds {service.started_at!r}",
        f"vllm:num_requests_running{{{labels}}} {float(engine.shown_running)}",
        f"vllm:num_requests_waiting{{{labels}}} {float(engine.shown_waiting)}",
        f"vllm:prefix_cache_queries_total{{{labels}}} {float(engine.prefix_queries)}",
        f"vllm:prefix_cache_hits_total{{{labels}}} {float(engine.prefix_hits)}",
    ]
    for names, updated in engine.lora_info.items() if service.options.enable_lora else ():
        shown = names.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        series = (
            f'max_lora="{slots}",running_lora_adapters="{shown}",waiting_lora_adapters="{shown}"'
        )
        lines.append(f"vllm:lora_requests_info{{{series}}} {updated!r}")
    return "\n".join(lines) + "\n"


def read_prompt(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the prompt's token ids; a text is one token for each byte."""
    prompt = content.get("prompt")
    if isinstance(prompt, str):
        prompt = language.encode(prompt)
    if not prompt:
        raise CallRefused(400, BAD, "You must pass at least one prompt")
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        raise invalid("the double takes one text or one list of token ids", "body.prompt")
    return tuple(prompt)


def read_request(
    content: Mapping[str, Any], adapter: Adapter | None, options: ServiceOptions
) -> SimulatedRequest:
    """Return the engine's request for a completion, or refuse it as vLLM does."""
    prompt = read_prompt(content)
    longest, vocab_size = options.engine.max_model_len, options.engine.vocab_size
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise CallRefused(400, BAD, f"Token id {token_id} is out of vocabulary")
    if len(prompt) >= longest:
        text = (
            f"This model's maximum context length is {longest} tokens. However, your prompt "
            f"contains {len(prompt)} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={len(prompt)})"
        )
        raise CallRefused(400, BAD, text, "input_tokens")
    max_tokens = content.get("max_tokens", 16)
    if max_tokens < 1:
        text = (
            f"max_tokens must be at least 1, got {max_tokens}. "
            f"(parameter=max_tokens, value={max_tokens})"
        )
        raise CallRefused(400, BAD, text, "max_tokens")
    top = content.get("prompt_logprobs")
    if top is not None and top > 20:
        text = (
            f"Requested prompt logprobs of {top}, which is greater than max allowed: 20 "
            f"(parameter=prompt_logprobs, value={top})"
        )
        raise CallRefused(400, BAD, text, "prompt_logprobs")
    return SimulatedRequest(
        adapter=adapter,
        prompt=prompt,
        max_tokens=min(max_tokens, longest - len(prompt)),
        temperature=content.get("temperature", 1.0),
        seed=content.get("seed"),
        ignore_eos=content.get("ignore_eos", False),
        score_prompt=top is not None,
        top=content.get("logprobs"),
    )


def completion_body(
    content: Mapping[str, Any], request: SimulatedRequest, model: str, answer_id: str
) -> dict[str, Any]:
    """Return the completion, or refuse it where a figure is not finite: JSON has no NaN."""
    figures = [*request.prompt_scores, *(request.token_scores if request.top is not None else ())]
    if not all(map(math.isfinite, figures)):
        raise CallRefused(400, BAD, "Out of range float values are not JSON compliant")
    with_ids = content.get("return_token_ids", False)
    choice = {
        "index": 0,
        "text": language.decode(request.token_ids),
        "logprobs": None if request.top is None else _chosen(request),
        "finish_reason": request.finish_reason,
        "stop_reason": None,
        "token_ids": request.token_ids if with_ids else None,
        "prompt_logprobs": _scored(request) if request.score_prompt else None,
        "prompt_token_ids": request.prompt if with_ids else None,
    }
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "system_fingerprint": f"vllm-{VERSION}-simulated",
        "usage": usage(request),
    }


def usage(request: SimulatedRequest) -> dict[str, int]:
    """Return the numbers of tokens that were read and written."""
    asked, given = len(request.prompt), len(request.token_ids)
    return {"prompt_tokens": asked, "total_tokens": asked + given, "completion_tokens": given}


def _scored(request: SimulatedRequest) -> list[dict[str, Any] | None]:
    pairs = zip(request.prompt[1:], request.prompt_scores, strict=True)
    return [None, *({str(token): _figure(token, score)} for token, score in pairs)]


def _figure(token_id: int, score: float) -> dict[str, Any]:
    return {"logprob": score, "rank": 1, "decoded_token": language.decode([token_id])}


def _chosen(request: SimulatedRequest) -> dict[str, Any]:
    tokens = [language.decode([token_id]) for token_id in request.token_ids]
    pairs = zip(tokens, request.token_scores, strict=True)
    return {
        "text_offset": [0] * len(tokens),
        "token_logprobs": request.token_scores,
        "tokens": tokens,
        "top_logprobs": [{token: score} for token, score in pairs],
    }
