"""The double's scheduler: the ways in which adapters starve, mix up or kill the engine."""

import itertools
import math

import pytest

from policyline.engines.simulated.engine import (
    EngineDied,
    EngineOptions,
    SimulatedEngine,
    SimulatedRequest,
)
from policyline.engines.simulated.weights import AdapterNotFound, Weights
from policyline.engines.simulated.worker import Adapter

PROMPT = tuple(range(5, 25))


class Bench:
    """An engine over a dictionary of adapters, with a clock that ticks at each look."""

    def __init__(self, options: EngineOptions | None = None) -> None:
        self.files = {f"/{number}": Weights(bytes([number])) for number in range(1, 9)}
        ticks = itertools.count(1)
        self.engine = SimulatedEngine(
            options or EngineOptions(max_loras=2), self._read, lambda: float(next(ticks))
        )

    def _read(self, path: str) -> Weights:
        if path not in self.files:
            raise AdapterNotFound(path)
        return self.files[path]

    def submit(
        self, adapter: Adapter | None, tokens: int = 5, prompt: tuple[int, ...] = PROMPT
    ) -> SimulatedRequest:
        request = SimulatedRequest(adapter, prompt, tokens, temperature=0, ignore_eos=True)
        self.engine.submit(request)
        return request

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def adapter(number: int, *, path: int | None = None, name: str | None = None) -> Adapter:
    return Adapter(number, name or f"v{number}", f"/{number if path is None else path}")


def test_company_does_not_change_tokens() -> None:
    alone = Bench()
    quiet = alone.submit(adapter(1))
    alone.run()
    bench = Bench()
    together = [bench.submit(adapter(number)) for number in (1, 2, 3, 1)]
    base = bench.submit(None)
    bench.run()

    assert together[0].token_ids == together[3].token_ids == quiet.token_ids
    assert len({tuple(request.token_ids) for request in (*together, base)}) == 4


def test_a_name_beyond_the_slots_waits_while_others_come() -> None:
    bench = Bench()
    bench.submit(adapter(1), 50)
    bench.submit(adapter(2), 50)
    bench.engine.step()
    third = bench.submit(adapter(3), 1)
    late = bench.submit(adapter(1), 1)
    base = bench.submit(None, 1)

    bench.engine.step()

    assert late.finish_reason == base.finish_reason == "length"
    assert third.finish_reason is None
    assert bench.engine.shown_waiting == 1
    assert list(bench.engine.lora_info)[-1] == "v1,v2"


def test_a_burst_of_loads_evicts_a_running_adapter() -> None:
    bench = Bench()
    running = bench.submit(adapter(1), 50)
    bench.engine.step()
    for number in (2, 3):
        bench.engine.worker.add(adapter(number))
    bench.engine.step()
    assert len(running.token_ids) == 2

    del bench.files["/1"]
    for number in (4, 5):
        bench.engine.worker.add(adapter(number))

    with pytest.raises(EngineDied):
        bench.engine.step()


def test_two_ids_of_one_name_kill_the_engine_once_one_is_evicted() -> None:
    bench = Bench()
    bench.submit(adapter(1, name="reused"), 50)
    bench.engine.step()
    bench.submit(adapter(2, name="reused"), 50)
    bench.engine.step()
    bench.engine.worker.add(adapter(3))

    with pytest.raises(EngineDied):
        bench.engine.step()


def test_changed_files_are_not_noticed_while_resident() -> None:
    bench = Bench()
    before = bench.submit(adapter(1))
    bench.run()
    bench.files["/1"] = Weights(b"other")
    after = bench.submit(adapter(1))
    bench.run()

    assert before.token_ids == after.token_ids


def test_the_prefix_cache_counts_hits() -> None:
    bench = Bench(EngineOptions(block_size=8))
    first, second = bench.submit(adapter(1)), bench.submit(adapter(1))
    other_name = bench.submit(adapter(2, path=1))
    bench.run()

    assert (first.cached_tokens, second.cached_tokens, other_name.cached_tokens) == (0, 16, 0)
    assert (bench.engine.prefix_queries, bench.engine.prefix_hits) == (60, 16)
    assert first.token_ids == second.token_ids


def test_a_prompt_is_never_wholly_cached() -> None:
    bench = Bench(EngineOptions(block_size=10))
    bench.submit(None)
    again = bench.submit(None)
    bench.run()

    assert again.cached_tokens == 10


def test_paused_requests_do_not_show_in_metrics() -> None:
    bench = Bench()
    bench.engine.pause("keep")
    bench.submit(adapter(1))

    assert not bench.engine.has_work
    assert bench.engine.shown_waiting == 0
    bench.engine.resume()
    assert bench.engine.has_work


def test_nan_weights_give_nan() -> None:
    bench = Bench()
    bench.files["/1"] = Weights(b"1", finite=False)
    request = bench.submit(adapter(1), 1)
    bench.run()

    assert math.isnan(request.token_scores[0])
