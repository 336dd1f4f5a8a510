"""A run's versions served again on another server, and what is found out by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.faults import ALWAYS, Fault
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.replay_into.errors import (
    CacheUnseen,
    NamesInUse,
    NothingToReplay,
    ServerGone,
    ServerInUse,
    ServerPaused,
    StateInvalid,
)
from policyline.replay_into.model import Replayed
from policyline.replay_into.records import Range
from policyline.replay_into.run import Replay
from policyline.watcher.errors import RuntimeLoadingOff
from policyline.watcher.vllm.answers import Completion, EngineInfo
from policyline.watcher.vllm.client import EngineClient
from tests.integration.replay.stage import VERSIONS, Stage, names, outcomes
from tests.integration.watcher.site import CountingClient, Site


def faulty(double: SimulatedServer, faults: dict[int, Fault]) -> type[CountingClient]:
    """A client at whose first load of a version the double misbehaves."""

    class Faulty(CountingClient):
        async def load(self, name: str, path: str) -> None:
            version = int(name.rpartition("-v")[2])
            if version in faults and name not in self.loads:
                double.script(faults[version])
            await super().load(name, path)

    return Faulty


async def test_every_version_answers_as_it_did_and_nothing_is_left(
    stage: Stage, double: SimulatedServer
) -> None:
    before = stage.ledger.head()

    results = await stage.replay(double)

    assert outcomes(results) == ["agrees"] * 5
    assert [r.difference for r in results.values()] == [0.0] * 5
    assert all(r.phases.keys() == {"fetch", "verify", "load", "probe"} for r in results.values())
    assert stage.loads == names(*VERSIONS)
    assert double.service.registry == {}
    assert double.service.engine.worker.resident_ids == ()
    assert stage.copies() == []
    assert stage.ledger.head() == before


async def test_only_the_versions_asked_for(stage: Stage, double: SimulatedServer) -> None:
    results = await stage.replay(double, versions=Range(2, 3))

    assert list(results) == [2, 3]
    with pytest.raises(NothingToReplay, match=r"published: 1\.\.5"):
        await stage.replay(double, versions=Range(7, None))


async def test_changed_bytes_are_found_and_do_not_stop_the_others(
    stage: Stage, double: SimulatedServer
) -> None:
    stage.spoil(3)

    results = await stage.replay(double)

    assert outcomes(results) == ["agrees", "agrees", "failed", "agrees", "agrees"]
    assert "sha256" in results[3].reason
    assert results[3].is_bad
    assert names(3)[0] not in stage.loads


async def test_a_version_whose_files_are_gone_fails(stage: Stage, double: SimulatedServer) -> None:
    (stage.storage.root / names(4)[0]).rename(stage.root / "elsewhere")

    results = await stage.replay(double)

    assert outcomes(results) == ["agrees", "agrees", "agrees", "failed", "agrees"]
    assert "does not exist" in results[4].reason


async def test_other_weights_under_the_name_differ(stage: Stage, double: SimulatedServer) -> None:
    double.script(Fault("completions", "as_base"))

    results = await stage.replay(double, versions=Range(1, 2))

    assert outcomes(results) == ["differs", "agrees"]
    assert (results[1].difference or 0) > 0.1
    assert results[1].replica == "r0"
    assert results[1].is_bad


async def test_another_build_is_reported_and_not_judged(stage: Stage) -> None:
    async with SimulatedServer(ServiceOptions(dev_mode=False)) as double:
        results = await stage.replay(double)

        assert outcomes(results) == ["other_build"] * 5
        assert not any(r.is_bad for r in results.values())
        assert all(r.difference == 0.0 and r.build for r in results.values())
        assert double.service.registry == {}


async def test_what_others_loaded_stays(
    stage: Stage, double: SimulatedServer, adapters: tuple[Path, ...]
) -> None:
    async with EngineClient(double.url) as client:
        await client.load("somebody-elses", str(adapters[7]))

        results = await stage.replay(double)

        assert outcomes(results) == ["agrees"] * 5
        assert list(double.service.registry) == ["somebody-elses"]
        assert len(double.service.engine.worker.resident_ids) == 1


async def test_copies_that_were_there_before_are_used_and_not_deleted(
    stage: Stage, double: SimulatedServer
) -> None:
    copy = stage.copy_here(2)

    results = await stage.replay(double)

    assert outcomes(results) == ["agrees"] * 5
    assert "fetch" not in results[2].phases
    assert stage.copies() == [copy]


async def test_a_copy_stays_while_somebody_elses_request_needs_it(stage: Stage) -> None:
    async with SimulatedServer(ServiceOptions(step_delay_s=0.01)) as double:
        asked: list[asyncio.Task[Completion]] = []

        class Meddling(CountingClient):
            async def score(self, model: str, token_ids: Sequence[int]) -> tuple[float, ...]:
                if model == names(1)[0]:
                    completion = somebody.complete(model, (1, 2, 3), 200, ignore_eos=True)
                    asked.append(asyncio.create_task(completion))
                    while not double.service.engine.running:  # noqa: ASYNC110 - no event tells
                        await asyncio.sleep(0)
                return await super().score(model, token_ids)

        def needed(_replay: Replay, result: Replayed) -> None:
            if result.version == 1:
                assert not asked[0].done()
                assert [copy for copy in stage.copies() if copy.startswith(names(1)[0])] != []

        async with EngineClient(double.url) as somebody:
            results = await stage.replay(double, client=Meddling, on_result=needed)
            (done,) = await asyncio.gather(*asked)

        assert outcomes(results) == ["agrees"] * 5
        assert len(done.token_ids) == 200


async def test_a_server_that_holds_a_name_is_refused_and_left_alone(
    stage: Stage, double: SimulatedServer, adapters: tuple[Path, ...]
) -> None:
    async with EngineClient(double.url) as client:
        await client.load(names(4)[0], str(adapters[7]))

    with pytest.raises(NamesInUse, match=r"trl-policy-v4 already.*unload_lora_adapter"):
        await stage.replay(double)

    assert list(double.service.registry) == names(4)
    assert stage.loads == []


async def test_a_server_with_a_sidecar_is_refused(stage: Stage, double: SimulatedServer) -> None:
    site = Site(stage.root, stage.ledger, stage.storage)
    async with site.sidecar(double, replica="r7"):
        with pytest.raises(ServerInUse, match="'r7'"):
            await stage.replay(double)


async def test_a_paused_server_is_refused(stage: Stage, double: SimulatedServer) -> None:
    async with EngineClient(double.url) as client:
        await client.pause("keep")

    with pytest.raises(ServerPaused, match="/resume"):
        await stage.replay(double)


async def test_a_server_without_runtime_loading_is_refused(stage: Stage) -> None:
    async with SimulatedServer(ServiceOptions(runtime_lora=False)) as double:
        with pytest.raises(RuntimeLoadingOff, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            await stage.replay(double)


async def test_no_server_is_reported_at_once(stage: Stage, double: SimulatedServer) -> None:
    await double.kill()

    with pytest.raises(ServerGone, match="does not answer"):
        await stage.replay(double)


async def test_a_cache_that_the_server_does_not_see(stage: Stage, double: SimulatedServer) -> None:
    no_adapter = Fault("load", "fail", status=404, message="No adapter found for <path>")

    with pytest.raises(CacheUnseen, match="--cache"):
        await stage.replay(double, client=faulty(double, {1: no_adapter}))


async def test_what_was_refused_then_is_refused_again_without_blame(
    stage: Stage, double: SimulatedServer
) -> None:
    strict = ServiceOptions(EngineOptions(max_lora_rank=8))
    async with SimulatedServer(strict) as engine:
        site = Site(stage.root, stage.ledger, stage.storage)
        async with site.sidecar(engine):
            await asyncio.to_thread(stage.publish, run="another", rank=16)
            await site.until_event("version_load_failed")

    results = await stage.replay(double, run="another")

    assert outcomes(results) == ["refused_again"]
    assert "rank 16" in results[6].reason.lower()
    assert not results[6].is_bad


async def test_a_refusal_that_nobody_recorded_fails(stage: Stage) -> None:
    async with SimulatedServer(ServiceOptions(EngineOptions(max_lora_rank=8))) as double:
        refusal = Fault("load", "fail", message="LoRA rank 9 is greater than max_lora_rank 8.")

        results = await stage.replay(
            double, versions=Range(1, 2), client=faulty(double, {1: refusal})
        )

    assert outcomes(results) == ["failed", "agrees"]


class RestartAfterLoad(CountingClient):
    """Restarts the double right after the load of version 2, the first time."""

    double: SimulatedServer

    async def load(self, name: str, path: str) -> None:
        await super().load(name, path)
        if name == names(2)[0] and self.loads.count(name) == 1:
            await self.double.restart()


async def test_a_restart_in_the_middle_is_noticed_and_the_version_tried_again(
    stage: Stage, double: SimulatedServer
) -> None:
    RestartAfterLoad.double = double

    results = await stage.replay(double, client=RestartAfterLoad)

    assert outcomes(results) == ["agrees"] * 5
    assert stage.loads == names(1, 2, 2, 3, 4, 5)
    assert double.service.registry == {}
    assert "trl-policy-v2" in stage.messages[0]


async def test_an_answer_of_a_former_life_does_not_count(
    stage: Stage, double: SimulatedServer
) -> None:
    class RestartAfterProbe(CountingClient):
        async def score(self, model: str, token_ids: Sequence[int]) -> tuple[float, ...]:
            values = await super().score(model, token_ids)
            if model == names(1)[0] and self.loads == names(1):
                await double.restart()
            return values

    results = await stage.replay(double, client=RestartAfterProbe)

    assert outcomes(results) == ["agrees"] * 5
    assert stage.loads == names(1, 1, 2, 3, 4, 5)


class DeadAtVersionTwo(CountingClient):
    """The engine dies at each load of version 2; somebody restarts it when it is missed."""

    double: SimulatedServer

    async def load(self, name: str, path: str) -> None:
        if name == names(2)[0]:
            self.double.script(Fault("load", "die"))
        await super().load(name, path)

    async def incarnation(self) -> str:
        if self.double.closed.is_set():
            await self.double.restart()
        return await super().incarnation()

    async def info(self) -> EngineInfo:
        if self.double.closed.is_set():
            await self.double.restart()
        return await super().info()


async def test_a_version_that_kills_the_engine_twice_fails_and_the_next_is_tried(
    stage: Stage, double: SimulatedServer
) -> None:
    DeadAtVersionTwo.double = double

    results = await stage.replay(double, client=DeadAtVersionTwo)

    assert outcomes(results) == ["agrees", "failed", "agrees", "agrees", "agrees"]
    assert results[2].reason.startswith("2 times: ")


async def test_an_engine_that_stays_away_ends_it_and_the_state_goes_on(
    stage: Stage, double: SimulatedServer, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"

    class Leaving(CountingClient):
        async def load(self, name: str, path: str) -> None:
            if name == names(3)[0]:
                await double.kill()
            await super().load(name, path)

    with pytest.raises(ServerGone, match="--state"):
        await stage.replay(double, state=state, client=Leaving, engine_back_s=0.0)
    await double.restart()
    results = await stage.replay(double, state=state)

    assert outcomes(results) == ["agrees"] * 5
    assert stage.loads == names(1, 2, 3, 3, 4, 5)


async def test_a_load_whose_answer_is_lost_is_taken_off_and_done_again(
    stage: Stage, double: SimulatedServer
) -> None:
    lost = Fault("load", "lose_reply")

    results = await stage.replay(double, client=faulty(double, {1: lost}))

    assert outcomes(results) == ["agrees"] * 5
    assert stage.loads == names(1, 1, 2, 3, 4, 5)
    assert double.service.registry == {}


async def test_a_stop_finishes_the_step_in_hand_and_leaves_nothing(
    stage: Stage, double: SimulatedServer, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"

    def stop_after_two(replay: Replay, result: Replayed) -> None:
        if result.version == 2:
            replay.stop()

    first = await stage.replay(double, state=state, on_result=stop_after_two)
    assert (list(first), double.service.registry) == ([1, 2], {})

    results = await stage.replay(double, state=state)

    assert outcomes(results) == ["agrees"] * 5
    assert stage.loads == names(*VERSIONS)


async def test_a_state_file_belongs_to_one_replay(
    stage: Stage, double: SimulatedServer, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    await stage.replay(double, state=state, versions=Range(1, 1))

    async with SimulatedServer() as another:
        with pytest.raises(StateInvalid, match="belongs to another replay: it has url"):
            await stage.replay(another, state=state)
    state.write_text("{")
    with pytest.raises(StateInvalid, match="cannot be read"):
        await stage.replay(double, state=state)


async def test_a_name_that_others_loaded_since_the_kill_is_left_alone(
    stage: Stage, double: SimulatedServer, adapters: tuple[Path, ...], tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    await stage.replay(double, state=state, versions=Range(1, 1))
    content = json.loads(state.read_text())
    state.write_text(json.dumps({**content, "loaded": {"name": names(2)[0], "path": "/ours"}}))
    async with EngineClient(double.url) as client:
        await client.load(names(2)[0], str(adapters[7]))

    with pytest.raises(NamesInUse):
        await stage.replay(double, state=state)

    assert list(double.service.registry) == names(2)


async def test_an_engine_that_keeps_no_word_is_not_waited_for_for_ever(
    stage: Stage, double: SimulatedServer
) -> None:
    double.script(Fault("completions", "hang", times=ALWAYS))

    results = await stage.replay(double, versions=Range(1, 1))

    assert outcomes(results) == ["failed"]
    assert "within" in results[1].reason
    assert double.service.registry == {}
    assert stage.copies() != []
    assert "may still read it" in stage.messages[-1]
