"""Ids in the workers' memory, learnt at loads and freed once nobody needs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policyline.watcher.core.model import Known
from policyline.watcher.core.plan import plan
from policyline.watcher.core.reconcile_state import ReconcileState
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineFault, RouteMissing
from policyline.watcher.vllm.worker_slots import WorkerSlots
from tests.unit.watcher.builders import LIMITS, NOW, actions, desired, known, version

INCARNATION, NEXT_LIFE = "1000.5", "2000.0"


class Workers(EngineClient):
    """An engine of which only the ids matter."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.ids: frozenset[int] | Exception = frozenset()
        self.asked = 0

    async def resident_ids(self) -> frozenset[int]:
        """As scripted."""
        self.asked += 1
        if isinstance(self.ids, Exception):
            raise self.ids
        return self.ids


async def load(adapter_ids: WorkerSlots, workers: Workers, version: int, *ids: int) -> None:
    await adapter_ids.before_load(INCARNATION)
    workers.ids = frozenset(ids)
    await adapter_ids.after_load(version)


class TestLearning:
    async def test_the_only_new_id_is_that_of_our_load(self) -> None:
        workers = Workers()
        workers.ids = frozenset({3})
        adapter_ids = WorkerSlots(workers)

        await load(adapter_ids, workers, 1, 3, 4)
        await load(adapter_ids, workers, 2, 4, 5)

        assert adapter_ids.of(INCARNATION) == {1: 4, 2: 5}
        assert workers.asked == 3

    async def test_two_new_ids_are_nobodys(self) -> None:
        workers = Workers()
        adapter_ids = WorkerSlots(workers)

        await load(adapter_ids, workers, 1, 1, 2)
        await load(adapter_ids, workers, 2, 2, 3)

        assert adapter_ids.of(INCARNATION) == {2: 3}

    async def test_an_old_id_that_comes_back_is_not_new(self) -> None:
        """vLLM reads an adapter that it dropped again, under its old id."""
        workers = Workers()
        adapter_ids = WorkerSlots(workers)
        await load(adapter_ids, workers, 1, 1)
        await load(adapter_ids, workers, 2, 2)

        await load(adapter_ids, workers, 3, 1, 2, 3)

        assert adapter_ids.of(INCARNATION)[3] == 3

    async def test_another_life_knows_nothing(self) -> None:
        workers = Workers()
        adapter_ids = WorkerSlots(workers)
        await load(adapter_ids, workers, 1, 1)

        assert adapter_ids.of(NEXT_LIFE) == {}
        await adapter_ids.before_load(NEXT_LIFE)
        assert adapter_ids.of(INCARNATION) == adapter_ids.of(NEXT_LIFE) == {}

    async def test_what_is_not_known_is_not_guessed(self) -> None:
        workers = Workers()
        adapter_ids = WorkerSlots(workers)
        workers.ids = EngineFault("x")
        await load(adapter_ids, workers, 1, 7)

        assert adapter_ids.of(INCARNATION) == {}

    async def test_without_the_route_it_asks_once(self) -> None:
        workers = Workers()
        adapter_ids = WorkerSlots(workers)
        workers.ids = RouteMissing("x")
        for number in (1, 2):
            await adapter_ids.before_load(INCARNATION)
            await adapter_ids.after_load(number)

        assert (adapter_ids.of(INCARNATION), workers.asked) == ({}, 1)


class TestFreeing:
    out_of_window = version(1, None, "evicted")
    served = version(2, "current", "acked")
    idle = ReconcileState(alive_at_s=NOW, idle_since_s={1: NOW})

    def seen(self, busy: frozenset[str] | None = frozenset(), **more: object) -> Known:
        observed = known([self.served], local=[self.out_of_window, self.served], busy=busy)
        return replace(observed, adapter_ids={1: 11, 2: 12}, **more)  # type: ignore[arg-type] # fields

    def test_only_what_is_out_of_window_unloaded_and_idle_goes(self) -> None:
        what = desired(self.served, self.out_of_window)

        assert actions(what, self.seen(), self.idle) == [("Free", "trl-policy-v1")]
        assert actions(what, self.seen(frozenset({"trl-policy-v1"})), self.idle) == []
        assert actions(what, self.seen(None), self.idle) == []
        assert actions(what, self.seen(paused=True), self.idle) == []

    def test_it_waits_for_a_look_after_the_unload(self) -> None:
        what = desired(self.served, self.out_of_window)

        found = plan(what, self.seen(), ReconcileState(alive_at_s=NOW), LIMITS, NOW)

        assert (found.actions, found.wake_at_s) == ((), NOW + 1.0)

    def test_what_a_refused_load_left_behind_goes_too(self) -> None:
        refused = version(1, "candidate", "rejected")

        found = actions(desired(self.served, refused), self.seen(), self.idle)

        assert found == [("Free", "trl-policy-v1")]


@pytest.mark.parametrize("reported", ["fetched", "failed", None])
def test_a_desired_version_is_never_freed(reported: str | None) -> None:
    wanted = version(1, "window", reported)  # type: ignore[arg-type] # literals above
    observed = replace(known(local=[wanted]), adapter_ids={1: 11})

    assert ("Free", wanted.name) not in actions(desired(wanted), observed)
