"""What the server tells about itself: incarnation, busy names, residency, pause, settings."""

import asyncio
from pathlib import Path

import httpx

from policyline.demo.synthetic import write_adapter
from policyline.watcher.vllm.answers import (
    METRICS,
    read_busy,
    read_incarnation,
    read_max_loras,
    read_stepped,
)
from policyline.watcher.vllm.client import EngineClient
from tests.engines import LENGTHS, LONG, PROMPT, decoding, until

Adapters = tuple[Path, ...]


async def test_the_incarnation_lasts(client: EngineClient) -> None:
    first = await client.incarnation()

    assert float(first) > 1e9
    assert (await client.snapshot()).incarnation == first


async def test_metrics_can_be_selected(
    client: EngineClient, raw: httpx.AsyncClient, adapters: Adapters
) -> None:
    """With a slash at its end the route heeds names, and a look costs a tenth."""
    await client.load("selected", str(adapters[0]))
    async with decoding(client, "selected"):
        pass
    some = (await raw.get("/metrics/", params={"name[]": METRICS})).text
    every = (await raw.get("/metrics")).text

    for read in (read_incarnation, read_busy, read_max_loras, read_stepped):
        assert read(some) == read(every)
    assert "vllm:num_requests_waiting{" in some
    assert "vllm:num_requests_running{" in every
    assert "vllm:num_requests_running{" not in some


async def test_a_name_is_busy_while_it_decodes(client: EngineClient, adapters: Adapters) -> None:
    await client.load("busy", str(adapters[0]))
    await client.load("idle", str(adapters[1]))

    async with decoding(client, "busy"):
        assert "idle" not in ((await client.snapshot()).busy or set())

    assert (await client.snapshot()).busy == frozenset()


async def test_names_with_odd_characters(client: EngineClient, adapters: Adapters) -> None:
    name = 'an "odd" \\ näme'
    await client.load(name, str(adapters[0]))

    async with decoding(client, name):
        pass

    assert [adapter.name for adapter in (await client.models()).adapters] == [name]


async def test_info(client: EngineClient) -> None:
    info = await client.info()

    assert info.version == "0.32.0"
    assert (info.max_loras, info.max_cpu_loras, info.max_lora_rank) == (6, 6, 8)
    assert (info.block_size, info.max_num_seqs) == (128, 16)
    assert info.served_model_names == ("tiny",)
    assert info.dev_endpoints
    assert info.runtime_lora
    assert "dtype=torch.bfloat16" in info.build
    assert (await client.models()).adapters == ()


async def test_server_info_has_what_trainers_read(raw: httpx.AsyncClient) -> None:
    content = (await raw.get("/server_info?config_format=json")).json()

    config = content["vllm_config"]
    assert config["lora_config"]["max_loras"] == 6
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["max_model_len"] == 512
    assert content["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] is True


async def test_unload_frees_nothing(client: EngineClient, adapters: Adapters) -> None:
    before = await client.resident_ids()
    await client.load("resident", str(adapters[0]))
    (loaded,) = await client.resident_ids() - before

    await client.unload("resident")

    assert loaded in await client.resident_ids()
    assert await client.remove_resident(loaded)
    assert not await client.remove_resident(loaded)
    assert loaded not in await client.resident_ids()


async def test_a_removed_adapter_is_read_again(client: EngineClient, adapters: Adapters) -> None:
    before = await client.resident_ids()
    await client.load("returning", str(adapters[0]))
    scores = await client.score("returning", PROMPT)
    (loaded,) = await client.resident_ids() - before
    await client.remove_resident(loaded)

    assert await client.score("returning", PROMPT) == scores
    assert loaded in await client.resident_ids()
    await client.remove_resident(loaded)


async def test_pause_keep_freezes_and_goes_on(client: EngineClient, adapters: Adapters) -> None:
    await client.load("paused", str(adapters[0]))
    quiet = await client.complete("paused", PROMPT, **LONG)

    async with decoding(client, "paused") as work:
        await client.pause("keep")
        assert await client.is_paused()
        await client.load("meanwhile", str(adapters[1]))
        await client.pause("keep")
        assert (await client.snapshot()).busy == frozenset({"paused"})
        await client.resume()
        await client.resume()

    assert not await client.is_paused()
    assert work.agree_with(quiet)
    assert {done.finish_reason for done in work.results} == {"length"}
    assert not work.errors


async def test_requests_wait_for_the_end_of_a_pause(
    client: EngineClient, adapters: Adapters
) -> None:
    await client.load("queued", str(adapters[0]))
    scores = await client.score("queued", PROMPT)
    await client.pause("keep")

    waiting = asyncio.create_task(client.score("queued", PROMPT))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    await client.unload("queued")
    assert not done
    await client.resume()

    assert await waiting == scores


async def test_pause_abort_cuts_short(client: EngineClient, adapters: Adapters) -> None:
    await client.load("cut", str(adapters[0]))

    async with decoding(client, "cut") as work:
        await client.pause("abort")
        await client.resume()

    cut = [done for done in work.results if done.finish_reason == "abort"]
    assert cut
    assert all(len(done.token_ids) < max(LENGTHS) for done in cut)
    # what was generated is kept; only one that has just been asked again has no token yet
    assert any(done.token_ids for done in cut)
    assert not work.errors


async def test_pause_wait_lets_requests_finish(client: EngineClient, adapters: Adapters) -> None:
    await client.load("finishing", str(adapters[0]))

    async with decoding(client, "finishing") as work:
        await client.pause("wait")
        assert await client.is_paused()
        await client.resume()

    assert {done.finish_reason for done in work.results} == {"length"}
    assert {len(done.token_ids) for done in work.results} == set(LENGTHS)
    assert not work.errors


async def test_an_unknown_pause_mode(raw: httpx.AsyncClient) -> None:
    answer = await raw.post("/pause?mode=bogus")

    assert answer.status_code == 400
    assert "Input should be 'abort', 'wait' or 'keep'" in answer.json()["error"]["message"]
    assert (await raw.get("/is_paused")).json() == {"is_paused": False}


async def test_an_abandoned_request_is_withdrawn(client: EngineClient, adapters: Adapters) -> None:
    await client.load("abandoned", str(adapters[0]))
    await client.load("other", str(adapters[1]))
    ask = asyncio.create_task(client.complete("abandoned", PROMPT, **LONG))

    async def busy() -> bool:
        assert not ask.done(), ask
        return "abandoned" in ((await client.snapshot()).busy or set())

    await until(busy)
    ask.cancel()

    async def gone() -> bool:
        # Only a step moves the series.
        await client.score("other", PROMPT)
        return "abandoned" not in ((await client.snapshot()).busy or set())

    await until(gone)


async def test_the_prefix_cache_knows_name_and_path_only(
    client: EngineClient, tmp_path: Path
) -> None:
    """Other content under a name and path used before is continued from the old content's KV."""
    prompt = [5 + position % 300 for position in range(200)]
    ask = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    path, fresh = tmp_path / "adapter", tmp_path / "fresh"
    write_adapter(path, 1)
    await client.load("reused", str(path))
    await client.complete("reused", prompt, **ask)
    await client.unload("reused")
    await client.load("fresh", str(write_adapter(fresh, 2)))
    expected = await client.complete("fresh", prompt, **ask)

    write_adapter(path, 2)
    await client.load("reused", str(path))
    stale = await client.complete("reused", prompt, **ask)
    await client.reset_prefix_cache()
    right = await client.complete("reused", prompt, **ask)

    assert stale.token_ids != expected.token_ids
    assert right.token_ids == expected.token_ids
