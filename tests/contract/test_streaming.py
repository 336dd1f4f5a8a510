"""Streams and chats: what the router passes on."""

import json
from typing import Any

import httpx
import pytest

from tests.engines import PROMPT

ASK: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
CHAT = {"messages": [{"role": "user", "content": "What is 1 plus 2?"}]}


def events(body: str) -> list[dict[str, Any]]:
    lines = [part.removeprefix("data: ") for part in body.split("\n\n") if part]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("path", "asked", "kind"),
    [
        ("/v1/completions", {"prompt": list(PROMPT)}, "text_completion"),
        ("/v1/chat/completions", CHAT, "chat.completion.chunk"),
    ],
)
async def test_a_stream(
    raw: httpx.AsyncClient, path: str, asked: dict[str, Any], kind: str
) -> None:
    answer = await raw.post(path, json={**ASK, **asked})

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert {event["object"] for event in found} == {kind}
    assert {event["model"] for event in found} == {"tiny"}
    reasons = [event["choices"][0]["finish_reason"] for event in found if event["choices"]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 6


async def test_a_chat(raw: httpx.AsyncClient) -> None:
    answer = await raw.post(
        "/v1/chat/completions", json={**ASK, **CHAT, "stream": False, "stream_options": None}
    )

    content = answer.json()
    assert answer.status_code == 200
    assert content["object"] == "chat.completion"
    assert content["choices"][0]["message"]["role"] == "assistant"
    assert content["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked", "prefix"),
    [
        ("/v1/completions", {"prompt": list(PROMPT)}, "cmpl"),
        ("/v1/chat/completions", CHAT, "chatcmpl"),
    ],
)
async def test_an_answers_id_holds_the_one_that_was_sent(
    raw: httpx.AsyncClient, path: str, asked: dict[str, Any], prefix: str, *, stream: bool
) -> None:
    """By it `ledger audit` finds the rollout that a client asks about."""
    options = None if not stream else ASK["stream_options"]
    answer = await raw.post(
        path,
        json={**ASK, **asked, "stream": stream, "stream_options": options},
        headers={"x-request-id": "0a1b2c3d4e5f"},
    )

    found = events(answer.text) if stream else [answer.json()]
    assert {event["id"] for event in found} == {f"{prefix}-0a1b2c3d4e5f"}


async def test_a_stream_of_a_model_that_is_not_there(raw: httpx.AsyncClient) -> None:
    answer = await raw.post(
        "/v1/completions", json={**ASK, "model": "none", "prompt": list(PROMPT)}
    )

    assert answer.status_code == 404
    assert "does not exist" in answer.json()["error"]["message"]


async def test_usage_comes_at_the_end_of_a_body(raw: httpx.AsyncClient) -> None:
    """The router reads it from the last 4 kB, however long the choices are."""
    body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 100, "logprobs": 5}
    answer = await raw.post(
        "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
    )

    assert len(answer.content) > 4096
    assert b'"usage":{' in answer.content[-4096:].replace(b": ", b":")
