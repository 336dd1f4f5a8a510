"""Chat completions and streams of the double, in vLLM 0.32's shapes as far as clients look."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from policyline.engines.simulated import language
from policyline.engines.simulated.answers import usage
from policyline.engines.simulated.engine import SimulatedRequest
from policyline.engines.simulated.service import CallRefused

_POLL_S = 0.001
"""Between two looks for new tokens: a step of the double takes no time of its own."""


def as_completion(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completion's request as one for a completion."""
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallRefused(400, "BadRequestError", "You must pass at least one message")
    turns = [f"<{m.get('role')}>{m.get('content')}" for m in messages]
    most = content.get("max_completion_tokens", content.get("max_tokens", 16))
    return {**content, "prompt": "\n".join(turns), "max_tokens": most, "logprobs": None}


def chat_body(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return a completion's body as a chat completion's."""
    (choice,) = completion["choices"]
    message = {"role": "assistant", "content": choice["text"], "tool_calls": []}
    return {
        **completion,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": choice["finish_reason"],
                "stop_reason": None,
            }
        ],
    }


async def events(
    content: Mapping[str, Any],
    request: SimulatedRequest,
    model: str,
    answer_id: str,
    *,
    chat: bool,
    running: Callable[[], Awaitable[None]],
) -> AsyncIterator[bytes]:
    """Yield a stream's events: one for what each look finds, the usage if asked for, `[DONE]`.

    Args:
        content: of the request.
        request: the engine's; its tokens grow.
        model: the name that was asked for.
        answer_id: of the answer.
        chat: whether chat completions are shaped.
        running: runs the request to its end.
    """
    head = {
        "id": answer_id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    task = asyncio.ensure_future(running())
    sent = 0
    try:
        while True:
            ended = task.done()
            if len(request.token_ids) > sent:
                fresh = request.token_ids[sent:]
                sent += len(fresh)
                choice = _choice(fresh, request.finish_reason, chat=chat)
                yield _event({**head, "choices": [choice]})
            if ended:
                break
            await asyncio.wait([task], timeout=_POLL_S)
        task.result()
    finally:
        task.cancel()
    if (content.get("stream_options") or {}).get("include_usage"):
        yield _event({**head, "choices": [], "usage": usage(request)})
    yield b"data: [DONE]\n\n"


def _choice(token_ids: Sequence[int], reason: str | None, *, chat: bool) -> dict[str, Any]:
    text = language.decode(token_ids)
    content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason, "stop_reason": None}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
