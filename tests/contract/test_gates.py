"""What is closed: the API key, runtime LoRA, the development routes."""

from collections.abc import AsyncIterator

import httpx
import pytest

from policyline.engines.child import ChildServer
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineUnauthorized, RouteMissing, RuntimeLoraDisabled
from tests.contract.conftest import KEY

NOT_FOUND = {"detail": "Not Found"}


@pytest.fixture
async def keyed(gated: ChildServer) -> AsyncIterator[EngineClient]:
    async with EngineClient(gated.url, api_key=KEY) as client:
        yield client


@pytest.fixture
async def anonymous(gated: ChildServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gated.url, timeout=60, trust_env=False) as raw:
        yield raw


@pytest.mark.parametrize("key", [None, "another"])
async def test_a_wrong_key(gated: ChildServer, key: str | None) -> None:
    async with EngineClient(gated.url, api_key=key) as client:
        for call in (client.models(), client.load("a", "b"), client.score("tiny", [5, 6])):
            with pytest.raises(EngineUnauthorized) as refused:
                await call
            assert refused.value.status == 401


async def test_the_right_key(keyed: EngineClient) -> None:
    assert (await keyed.snapshot()).models.base.name == "tiny"
    assert len(await keyed.score("tiny", [5, 6, 7])) == 2


async def test_the_key_guards_v1_alone(anonymous: httpx.AsyncClient) -> None:
    for path in ("/health", "/version", "/metrics"):
        assert (await anonymous.get(path)).status_code == 200
    answer = await anonymous.get("/v1/no_such_route")
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})


async def test_without_runtime_lora(keyed: EngineClient, anonymous: httpx.AsyncClient) -> None:
    with pytest.raises(RuntimeLoraDisabled, match="no such route") as closed:
        await keyed.load("a", "/b")
    with pytest.raises(RuntimeLoraDisabled):
        await keyed.unload("a")

    headers = {"Authorization": f"Bearer {KEY}"}
    answer = await anonymous.post("/v1/load_lora_adapter", json={}, headers=headers)
    assert (answer.status_code, answer.json()) == (404, NOT_FOUND)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in closed.value.hint


async def test_without_development_routes(
    keyed: EngineClient, anonymous: httpx.AsyncClient
) -> None:
    for call in (keyed.is_paused(), keyed.pause("keep"), keyed.resume(), keyed.resident_ids()):
        with pytest.raises(RouteMissing):
            await call
    answer = await anonymous.get("/is_paused")
    assert (answer.status_code, answer.json()) == (404, NOT_FOUND)


async def test_info_without_development_routes(keyed: EngineClient) -> None:
    info = await keyed.info()

    assert not info.dev_endpoints
    assert info.runtime_lora is False
    assert info.max_loras is None
    assert info.served_model_names == ("tiny",)
    assert info.build == "vllm 0.32.0 (settings unknown)"
