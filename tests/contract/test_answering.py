"""Scores and completions: which weights answer, and what a request may ask."""

import statistics
from pathlib import Path
from typing import Any

import httpx
import pytest

from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterMissing, RequestRefused
from tests.engines import LENGTHS, LONG, PROMPT, decoding

Adapters = tuple[Path, ...]
COMPLETIONS = "/v1/completions"


async def test_a_score_for_each_token_but_the_first(client: EngineClient) -> None:
    scores = await client.score("tiny", PROMPT)

    assert len(scores) == len(PROMPT) - 1
    assert all(score < 0 for score in scores)


async def test_the_body_of_a_score(raw: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 0}

    answer = (await raw.post(COMPLETIONS, json=body)).json()

    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in others] == [["6"], ["7"]]
    assert {"logprob", "rank", "decoded_token"} == set(others[0]["6"])
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 3, "completion_tokens": 1}


async def test_scores_repeat_exactly(client: EngineClient, adapters: Adapters) -> None:
    await client.load("again", str(adapters[0]))
    first = await client.score("again", PROMPT)

    assert [await client.score("again", PROMPT) for _ in range(5)] == [first] * 5


async def test_scores_tell_adapters_apart(client: EngineClient, adapters: Adapters) -> None:
    for number, path in enumerate(adapters[:4]):
        await client.load(f"v{number}", str(path))
    names = ["tiny", *(f"v{number}" for number in range(4))]

    scores = [await client.score(name, PROMPT) for name in names]

    for one in range(len(names)):
        for other in range(one):
            pairs = zip(scores[one], scores[other], strict=True)
            assert statistics.mean(abs(a - b) for a, b in pairs) > 0.1


async def test_temperature_has_no_part_in_scores(raw: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 1, "prompt_logprobs": 0}

    cold, hot = [
        (await raw.post(COMPLETIONS, json={**body, "temperature": temperature})).json()
        for temperature in (0, 2)
    ]

    assert cold["choices"][0]["prompt_logprobs"] == hot["choices"][0]["prompt_logprobs"]


async def test_a_completion(client: EngineClient, adapters: Adapters) -> None:
    await client.load("writer", str(adapters[0]))

    done = await client.complete("writer", PROMPT, 7, temperature=0, ignore_eos=True)

    assert done.model == "writer"
    assert len(done.token_ids) == 7
    assert done.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), 7)


async def test_a_text_as_prompt(client: EngineClient) -> None:
    done = await client.complete("tiny", "What is 1 plus 2?", 3, temperature=0, ignore_eos=True)

    assert len(done.token_ids) == 3
    assert done.usage.prompt_tokens > 0


async def test_greedy_completions_repeat(client: EngineClient, adapters: Adapters) -> None:
    await client.load("one", str(adapters[0]))
    await client.load("two", str(adapters[1]))
    ask = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}

    one, two, one_again = [
        (await client.complete(name, PROMPT, **ask)).token_ids for name in ("one", "two", "one")
    ]

    assert one == one_again
    assert one != two


async def test_a_seed_repeats_a_sample(client: EngineClient) -> None:
    ask: dict[str, Any] = {"max_tokens": 12, "temperature": 1, "ignore_eos": True}

    first = await client.complete("tiny", PROMPT, seed=1, **ask)
    again = await client.complete("tiny", PROMPT, seed=1, **ask)
    other = await client.complete("tiny", PROMPT, seed=2, **ask)

    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_a_completion_ends_with_the_context(client: EngineClient) -> None:
    done = await client.complete("tiny", [5] * 506, 100, ignore_eos=True)

    assert (len(done.token_ids), done.finish_reason) == (6, "length")


async def test_an_unknown_model(client: EngineClient, raw: httpx.AsyncClient) -> None:
    answer = await raw.post(COMPLETIONS, json={"model": "nobody", "prompt": [5]})

    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert answer.json()["error"]["message"].startswith("The model `nobody` does not exist.")
    with pytest.raises(AdapterMissing):
        await client.complete("nobody", [5], 1)


@pytest.mark.parametrize("model", [{"model": ""}, {"model": None}, {}])
async def test_no_model_is_the_base(raw: httpx.AsyncClient, model: dict[str, Any]) -> None:
    answer = await raw.post(COMPLETIONS, json={**model, "prompt": [5], "max_tokens": 1})

    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny"


async def test_the_client_does_not_ask_without_a_model(client: EngineClient) -> None:
    with pytest.raises(ValueError, match="needs the name of a model"):
        await client.score("", PROMPT)


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"prompt": [5] * 600}, "This model's maximum context length is 512 tokens."),
    "no prompt": ({"prompt": []}, "You must pass at least one prompt"),
    "no tokens": ({"prompt": [5], "max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    "no such token": ({"prompt": [99999]}, "Token id 99999 is out of vocabulary"),
    "logprobs": ({"prompt": [5], "prompt_logprobs": 21}, "Requested prompt logprobs of 21"),
}


@pytest.mark.parametrize("case", _REFUSED)
async def test_refused_requests(case: str, raw: httpx.AsyncClient) -> None:
    body, text = _REFUSED[case]

    answer = await raw.post(COMPLETIONS, json={"model": "tiny", "max_tokens": 1, **body})

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert answer.json()["error"]["message"].startswith(text)


async def test_a_refused_request_is_told_apart(client: EngineClient) -> None:
    with pytest.raises(RequestRefused, match="maximum context length"):
        await client.score("tiny", [5] * 600)


async def test_loads_during_decode(client: EngineClient, adapters: Adapters) -> None:
    await client.load("steady", str(adapters[0]))
    quiet = await client.complete("steady", PROMPT, **LONG)

    async with decoding(client, "steady") as work:
        for number, path in enumerate(adapters[1:5]):
            await client.load(f"arriving-{number}", str(path))
            await client.score(f"arriving-{number}", PROMPT)

    assert len(work.results) >= len(LENGTHS)
    assert work.agree_with(quiet)
    assert not work.errors


async def test_unload_during_decode(client: EngineClient, adapters: Adapters) -> None:
    await client.load("short-lived", str(adapters[0]))
    quiet = await client.complete("short-lived", PROMPT, **LONG)

    async with decoding(client, "short-lived") as work:
        await client.unload("short-lived")
        with pytest.raises(AdapterMissing):
            await client.complete("short-lived", PROMPT, 1)

    assert len(work.results) >= len(LENGTHS)
    assert work.agree_with(quiet)
    assert {type(error) for error in work.errors} <= {AdapterMissing}
