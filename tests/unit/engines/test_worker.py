"""The double's worker: two LRU caches, pins, zombies."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policyline.engines.simulated.weights import AdapterNotFound, Weights
from policyline.engines.simulated.worker import Adapter, Worker, WorkerFault


@dataclass
class Disk:
    """Adapters by path, and which paths were read."""

    files: dict[str, Weights] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def read(self, path: str) -> Weights:
        self.reads.append(path)
        if path not in self.files:
            raise AdapterNotFound(path)
        return self.files[path]


def adapter(number: int, *, load_inplace: bool = False) -> Adapter:
    return Adapter(number, f"v{number}", f"/{number}", load_inplace)


def worker_with(disk: Disk, slots: int = 2, cpu_slots: int = 2, upto: int = 9) -> Worker:
    disk.files.update({f"/{number}": Weights(bytes([number])) for number in range(1, upto)})
    return Worker(slots, cpu_slots, disk.read)


def test_a_resident_adapter_is_not_read_again() -> None:
    disk = Disk()
    worker = worker_with(disk)
    worker.add(adapter(1))
    worker.add(adapter(1))

    assert disk.reads == ["/1"]


def test_the_least_recently_used_goes_first() -> None:
    worker = worker_with(Disk())
    worker.add(adapter(1))
    worker.add(adapter(2))
    worker.add(adapter(1))
    worker.add(adapter(3))

    assert worker.resident_ids == (1, 3)
    assert worker.active_ids == (1, 3)


def test_a_larger_cpu_cache_spares_the_reading() -> None:
    disk = Disk()
    worker = worker_with(disk, slots=2, cpu_slots=3)
    for number in (1, 2, 3, 1, 2, 3):
        worker.add(adapter(number))

    assert disk.reads == ["/1", "/2", "/3"]
    assert worker.resident_ids == (1, 2, 3)
    assert worker.active_ids == (2, 3)


def test_a_fault_while_reading_evicts_nobody() -> None:
    worker = worker_with(Disk())
    worker.add(adapter(1))
    worker.add(adapter(2))

    with pytest.raises(AdapterNotFound):
        worker.add(adapter(77))

    assert worker.resident_ids == (1, 2)


def test_a_fault_after_reading_costs_a_place_and_leaves_a_zombie() -> None:
    disk = Disk()
    worker = worker_with(disk)
    disk.files["/8"] = Weights(b"", late_fault="wrong shape")
    worker.add(adapter(1))
    worker.add(adapter(2))

    with pytest.raises(WorkerFault, match="wrong shape"):
        worker.add(adapter(8))

    assert worker.resident_ids == (2, 8)


def test_no_tensors_cost_a_place_and_leave_none() -> None:
    disk = Disk()
    worker = worker_with(disk)
    disk.files["/8"] = Weights(b"", late_fault="", stays=False)
    worker.add(adapter(1))
    worker.add(adapter(2))

    with pytest.raises(WorkerFault):
        worker.add(adapter(8))

    assert worker.resident_ids == (2,)


def test_in_place_reads_at_every_step() -> None:
    disk = Disk()
    worker = worker_with(disk)
    for _ in range(3):
        worker.add(adapter(1, load_inplace=True))

    assert disk.reads == ["/1"] * 3


def test_pins_last() -> None:
    worker = worker_with(Disk())
    worker.add(adapter(1))
    worker.pin(1)
    for number in (2, 3, 4):
        worker.add(adapter(number))

    assert 1 in worker.resident_ids


def test_all_pinned_means_no_room() -> None:
    worker = worker_with(Disk(), slots=2, cpu_slots=3)
    for number in (1, 2):
        worker.add(adapter(number))
        worker.pin(number)

    with pytest.raises(WorkerFault, match="All items are pinned"):
        worker.add(adapter(3))
    # As in vLLM, it still sits in the CPU cache.
    assert worker.resident_ids == (1, 2, 3)


def test_only_a_resident_adapter_is_pinned() -> None:
    with pytest.raises(WorkerFault, match=r"Pinning failed\. LoRA 5 is not registered\."):
        worker_with(Disk()).pin(5)


@given(
    slots=st.integers(1, 4),
    extra=st.integers(0, 3),
    steps=st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(1, 8)), max_size=60),
)
def test_the_caches_keep_their_bounds(slots: int, extra: int, steps: list[tuple[str, int]]) -> None:
    worker = worker_with(Disk(), slots, slots + extra)
    for action, number in steps:
        if action == "add":
            worker.add(adapter(number))
            assert worker.resident_ids[-1] == worker.active_ids[-1] == number
            assert worker.weights(number).key == bytes([number])
        else:
            was_there = number in worker.resident_ids
            assert worker.remove(number) == was_there
        assert len(worker.resident_ids) <= slots + extra
        assert len(worker.active_ids) <= slots
        assert set(worker.active_ids) <= set(worker.resident_ids)
