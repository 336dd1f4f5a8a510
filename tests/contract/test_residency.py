"""Two slots and more names than that: what stays in memory, and what a request then finds."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from policyline.demo.synthetic import write_adapter
from policyline.engines.child import ChildServer
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineDead, EngineUnreachable, NonFinite
from tests.engines import ENDLESS, LENGTHS, PATIENT, PROMPT, REFUSED, decoding, not_a_number, until


@pytest.fixture
async def engine(small: ChildServer) -> AsyncIterator[EngineClient]:
    async with EngineClient(small.url, timeouts=PATIENT) as client:
        yield client


async def load(client: EngineClient, name: str, path: Path) -> int:
    """Load an adapter and return its id: the only new one."""
    before = await client.resident_ids()
    await client.load(name, str(path))
    (new,) = await client.resident_ids() - before
    return new


async def test_the_least_recently_used_is_evicted_silently(
    engine: EngineClient, tmp_path: Path
) -> None:
    paths = [write_adapter(tmp_path / str(seed), seed) for seed in range(4)]
    ids, scores = [], []
    for number, path in enumerate(paths):
        ids.append(await load(engine, f"lru-{number}", path))
        scores.append(await engine.score(f"lru-{number}", PROMPT))
    listed = {adapter.name for adapter in (await engine.models()).adapters}

    assert await engine.resident_ids() == {ids[2], ids[3]}
    assert {f"lru-{number}" for number in range(4)} <= listed
    # Evicted ones are read again from their paths, one for one.
    assert [await engine.score(f"lru-{number}", PROMPT) for number in range(4)] == scores
    assert await engine.resident_ids() == {ids[2], ids[3]}


async def test_an_unloaded_adapter_outranks_an_idle_one(
    engine: EngineClient, tmp_path: Path
) -> None:
    idle = await load(engine, "idle", write_adapter(tmp_path / "idle", 1))
    used = await load(engine, "used", write_adapter(tmp_path / "used", 2))
    await engine.score("used", PROMPT)
    await engine.unload("used")
    new = await load(engine, "new", write_adapter(tmp_path / "new", 3))

    assert await engine.resident_ids() == {used, new}
    assert idle not in await engine.resident_ids()


async def test_changed_files_of_an_evicted_name_are_served_silently(
    engine: EngineClient, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "changing", 1)
    evicted = await load(engine, "changing", path)
    before = await engine.score("changing", PROMPT)
    await load(engine, "one", write_adapter(tmp_path / "one", 2))
    await load(engine, "two", write_adapter(tmp_path / "two", 3))
    assert evicted not in await engine.resident_ids()

    write_adapter(path, 3)

    assert await engine.score("changing", PROMPT) != before
    assert await engine.score("changing", PROMPT) == await engine.score("two", PROMPT)


async def test_a_resident_adapter_needs_no_files(engine: EngineClient, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "gone", 1)
    await load(engine, "gone", path)
    before = await engine.score("gone", PROMPT)
    shutil.rmtree(path)

    assert await engine.score("gone", PROMPT) == before
    await engine.unload("gone")


async def test_a_wrong_shape_costs_a_place(engine: EngineClient, tmp_path: Path) -> None:
    """The fault comes after room was made, and the id stays behind: a zombie."""
    keep = await load(engine, "keep", write_adapter(tmp_path / "keep", 1))
    last = await load(engine, "last", write_adapter(tmp_path / "last", 2))
    assert await engine.resident_ids() == {keep, last}
    with pytest.raises(Exception, match="size of tensor"):
        await engine.load("zombie", str(REFUSED["too wide"][0](tmp_path / "zombie")))

    (zombie,) = await engine.resident_ids() - {keep, last}
    assert await engine.resident_ids() == {last, zombie}
    assert await engine.remove_resident(zombie)


async def test_more_names_than_slots_take_turns(engine: EngineClient, tmp_path: Path) -> None:
    names = [f"turn-{number}" for number in range(4)]
    for number, name in enumerate(names):
        await engine.load(name, str(write_adapter(tmp_path / name, number)))
    ask = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    quiet = [(await engine.complete(name, PROMPT, **ask)).token_ids for name in names]

    together = await asyncio.gather(*(engine.complete(name, PROMPT, **ask) for name in names * 2))

    assert [done.token_ids for done in together] == quiet * 2


async def test_a_name_beyond_the_slots_starves(engine: EngineClient, tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second", "third")):
        await engine.load(name, str(write_adapter(tmp_path / name, number)))
    # Long enough that a test process that stands still for seconds misses nothing.
    long = [asyncio.create_task(engine.complete(n, PROMPT, **ENDLESS)) for n in ("first", "second")]

    async def both_decode() -> bool:
        return (await engine.snapshot()).busy == frozenset({"first", "second"})

    await until(both_decode)
    third = asyncio.create_task(engine.complete("third", PROMPT, 1, temperature=0))

    async def unknown() -> bool:
        return (await engine.snapshot()).busy is None

    # It waits for a slot, and until its first token nothing tells whose request waits.
    await until(unknown)
    # Later requests of those that have a slot overtake it.
    for name in ("first", "second") * 4:
        await engine.complete(name, PROMPT, 1, temperature=0)
    assert not third.done()
    assert not any(task.done() for task in long)

    for task in long:
        task.cancel()
    assert (await third).model == "third"


async def test_nan_is_told_apart(engine: EngineClient, tmp_path: Path) -> None:
    await engine.load("nan", str(not_a_number(tmp_path / "nan")))

    with pytest.raises(NonFinite) as refused:
        await engine.score("nan", PROMPT)

    assert refused.value.status == 400


async def test_a_restart_forgets_everything(small: ChildServer, engine: EngineClient) -> None:
    before = await engine.snapshot()
    closed = asyncio.create_task(engine.wait_closed())
    await engine.incarnation()
    small.kill()
    await asyncio.wait_for(closed, 5)
    with pytest.raises(EngineUnreachable):
        await engine.snapshot()

    small.start()
    await asyncio.to_thread(small.wait_healthy, 300)
    after = await engine.snapshot()

    assert before.models.adapters
    assert after.models.adapters == ()
    assert after.incarnation != before.incarnation
    assert float(after.incarnation) > float(before.incarnation)
    assert await engine.resident_ids() == frozenset()


async def test_an_evicted_name_without_files_kills_the_engine(
    small: ChildServer, engine: EngineClient, tmp_path: Path
) -> None:
    lost = write_adapter(tmp_path / "lost", 1)
    await engine.load("lost", str(lost))
    for number in (2, 3):
        await engine.load(f"v{number}", str(write_adapter(tmp_path / str(number), number)))
    shutil.rmtree(lost)

    async with decoding(engine, "v2") as neighbours:
        with pytest.raises(EngineDead):
            await engine.score("lost", PROMPT)

    assert len(neighbours.errors) == len(LENGTHS)
    assert {type(error) for error in neighbours.errors} <= {EngineDead, EngineUnreachable}
    assert EngineDead in {type(error) for error in neighbours.errors}

    async def refuses() -> bool:
        try:
            await engine.incarnation()
        except EngineUnreachable:
            return True
        except EngineDead:
            return False
        return False

    await until(refuses)

    async def ended() -> bool:
        return small.exit_status is not None

    await until(ended)
    assert small.exit_status == 0
