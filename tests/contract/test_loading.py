"""The registry: load, unload, list, and what is refused with which text."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from policyline.watcher.vllm.answers import EngineAdapter
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import (
    AdapterAlreadyLoaded,
    AdapterMissing,
    AdapterRefused,
    EngineError,
)
from tests.engines import (
    PROMPT,
    REFUSED,
    beyond_the_layers,
    lone_b_of_a_fused_layer,
    too_narrow,
    zero_b,
)

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"

Adapters = tuple[Path, ...]


async def test_load_lists_name_and_path(client: EngineClient, adapters: Adapters) -> None:
    await client.load("policy-v1", str(adapters[0]))
    await client.load("policy-v2", str(adapters[1]))

    models = await client.models()

    assert models.base.name == "tiny"
    assert models.base.max_model_len == 512
    assert models.adapters == (
        EngineAdapter("policy-v1", str(adapters[0])),
        EngineAdapter("policy-v2", str(adapters[1])),
    )


async def test_success_is_plain_text(
    raw: httpx.AsyncClient, client: EngineClient, adapters: Adapters
) -> None:
    loaded = await raw.post(LOAD, json={"lora_name": "plain", "lora_path": str(adapters[0])})
    unloaded = await raw.post(UNLOAD, json={"lora_name": "plain"})

    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'plain' added successfully.",
    )
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'plain' removed successfully.",
    )


async def test_an_adapter_names_its_base_as_parent(
    raw: httpx.AsyncClient, client: EngineClient, adapters: Adapters
) -> None:
    await client.load("child", str(adapters[0]))

    base, adapter = (await raw.get("/v1/models")).json()["data"]

    assert (base["id"], base["parent"]) == ("tiny", None)
    assert (adapter["parent"], adapter["root"]) == ("tiny", str(adapters[0]))
    assert adapter["max_model_len"] is None


@pytest.mark.parametrize("path", [0, 1], ids=["same path", "other path"])
async def test_a_name_is_loaded_once(client: EngineClient, adapters: Adapters, path: int) -> None:
    await client.load("once", str(adapters[0]))

    with pytest.raises(AdapterAlreadyLoaded) as refused:
        await client.load("once", str(adapters[path]))

    assert refused.value.status == 400
    assert (await client.models()).adapters == (EngineAdapter("once", str(adapters[0])),)


async def test_two_names_on_one_path(client: EngineClient, adapters: Adapters) -> None:
    await client.load("first", str(adapters[0]))
    await client.load("second", str(adapters[0]))

    assert await client.score("first", PROMPT) == await client.score("second", PROMPT)


async def test_a_symlinked_directory(
    client: EngineClient, adapters: Adapters, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(adapters[0])
    await client.load("linked", str(link))

    assert (await client.models()).adapters == (EngineAdapter("linked", str(link)),)


async def test_concurrent_loads_of_one_name(client: EngineClient, adapters: Adapters) -> None:
    loads = [client.load("racing", str(adapters[0])) for _ in range(4)]

    results = await asyncio.gather(*loads, return_exceptions=True)

    assert sum(result is None for result in results) == 1
    assert sum(isinstance(result, AdapterAlreadyLoaded) for result in results) == 3


async def test_unload_is_at_once(client: EngineClient, adapters: Adapters) -> None:
    await client.load("leaving", str(adapters[0]))
    await client.unload("leaving")

    assert (await client.models()).adapters == ()
    with pytest.raises(AdapterMissing) as missing:
        await client.score("leaving", PROMPT)
    assert missing.value.status == 404


async def test_unload_of_an_unknown_name(client: EngineClient) -> None:
    with pytest.raises(AdapterMissing, match=r"The lora adapter 'nobody' cannot be found\."):
        await client.unload("nobody")


@pytest.mark.parametrize("case", REFUSED)
async def test_refused(
    case: str, client: EngineClient, raw: httpx.AsyncClient, tmp_path: Path
) -> None:
    write, status, text, reason = REFUSED[case]
    path = str(write(tmp_path / "adapter"))

    with pytest.raises(AdapterRefused) as refused:
        await client.load("refused", path)
    answer = await raw.post(LOAD, json={"lora_name": "refused", "lora_path": path})

    error = answer.json()["error"]
    assert text in error["message"]
    assert str(tmp_path) not in error["message"]
    assert (refused.value.status, refused.value.reason) == (status, reason)
    assert (answer.status_code, error["code"]) == (status, status)
    assert error["type"] == ("NotFoundError" if status == 404 else "InternalServerError")
    assert (await client.models()).adapters == ()


async def test_a_refusal_harms_nobody(
    client: EngineClient, adapters: Adapters, tmp_path: Path
) -> None:
    await client.load("good", str(adapters[0]))
    before = await client.score("good", PROMPT)

    for number, (write, *_) in enumerate(REFUSED.values()):
        with pytest.raises(AdapterRefused):
            await client.load("bad", str(write(tmp_path / str(number))))

    assert await client.score("good", PROMPT) == before
    await client.load("bad", str(adapters[1]))
    assert await client.score("bad", PROMPT) != before


_INVALID: dict[str, tuple[str, object, str, str]] = {
    "no fields": (LOAD, {}, "Bad Request", "2 validation errors:\n  {'type': 'missing'"),
    "no path": (LOAD, {"lora_name": "a"}, "Bad Request", "1 validation error:\n  {'type': 'miss"),
    "null name": (LOAD, {"lora_name": None, "lora_path": "b"}, "Bad Request", "1 validation"),
    "number": (LOAD, {"lora_name": 3, "lora_path": "b"}, "Bad Request", "1 validation error"),
    "a list": (LOAD, [], "Bad Request", "1 validation error:\n  {'type': 'model_attributes"),
    "empty name": (
        LOAD,
        {"lora_name": "", "lora_path": "b"},
        "InvalidUserInput",
        "Both 'lora_name' and 'lora_path' must be provided.",
    ),
    "empty path": (
        LOAD,
        {"lora_name": "a", "lora_path": ""},
        "InvalidUserInput",
        "Both 'lora_name' and 'lora_path' must be provided.",
    ),
    "the base": (
        LOAD,
        {"lora_name": "tiny", "lora_path": "b"},
        "InvalidUserInput",
        "The lora adapter 'tiny' conflicts with a served base model.",
    ),
    "unload, no name": (UNLOAD, {}, "Bad Request", "1 validation error:\n  {'type': 'missing'"),
    "unload, empty name": (
        UNLOAD,
        {"lora_name": ""},
        "InvalidUserInput",
        "'lora_name' needs to be provided to unload a LoRA adapter.",
    ),
}


@pytest.mark.parametrize("case", _INVALID)
async def test_invalid_requests(case: str, raw: httpx.AsyncClient) -> None:
    path, body, kind, text = _INVALID[case]

    answer = await raw.post(path, json=body)

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(text)
    assert (error["type"], error["code"]) == (kind, 400)


async def test_only_json_is_taken(raw: httpx.AsyncClient) -> None:
    answer = await raw.post(LOAD, content="{}", headers={"Content-Type": "text/plain"})

    assert answer.status_code == 400
    assert "Unsupported Media Type: Only 'application/json' is allowed" in answer.text


@pytest.mark.parametrize("write", [zero_b, beyond_the_layers])
async def test_accepted_and_equal_to_the_base(
    client: EngineClient, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    base = await client.score("tiny", PROMPT)
    await client.load("nothing", str(write(tmp_path / "adapter")))

    assert await client.score("nothing", PROMPT) == base


@pytest.mark.parametrize("write", [too_narrow, lone_b_of_a_fused_layer])
async def test_accepted_and_wrong(
    client: EngineClient, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    base = await client.score("tiny", PROMPT)
    await client.load("wrong", str(write(tmp_path / "adapter")))

    assert await client.score("wrong", PROMPT) != base


async def test_errors_are_short(client: EngineClient) -> None:
    with pytest.raises(EngineError) as error:
        await client.load("long", os.sep + "x" * 2000)

    assert len(error.value.message) <= 256
