"""The double's worker: which adapters are in memory, and how they get in and out.

Source: vllm/lora/worker_manager.py (LRUCacheWorkerLoRAManager) and model_manager.py, vLLM 0.32.
Two LRU caches: GPU slots (`max_loras`) and the CPU cache (`max_cpu_loras`). The registry of names
is not here: the worker has never heard of an unload.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from policyline.engines.simulated.weights import Weights


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a request carries of its adapter."""

    id: int
    name: str
    path: str
    load_inplace: bool = False


class WorkerFault(Exception):
    """The worker cannot do what it was asked; the text is what vLLM reports."""


class Worker:
    """The two caches and the pins.

    Args:
        max_loras: GPU slots.
        max_cpu_loras: slots in the CPU cache, not fewer than `max_loras`.
        read: reads an adapter's directory; it raises `AdapterUnreadable`.
    """

    def __init__(self, max_loras: int, max_cpu_loras: int, read: Callable[[str], Weights]) -> None:
        self._max_loras = max_loras
        self._max_cpu_loras = max_cpu_loras
        self._read = read
        self._cached: OrderedDict[int, Weights] = OrderedDict()
        self._active: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()

    @property
    def resident_ids(self) -> tuple[int, ...]:
        """Ids in the CPU cache, the least recently used first."""
        return tuple(self._cached)

    @property
    def active_ids(self) -> tuple[int, ...]:
        """Ids in a GPU slot, the least recently used first."""
        return tuple(self._active)

    def weights(self, adapter_id: int) -> Weights:
        """Return the weights in the id's GPU slot; KeyError when it has none."""
        if adapter_id not in self._active:
            raise KeyError(adapter_id)
        return self._cached[adapter_id]

    def add(self, adapter: Adapter, preread: Weights | None = None) -> None:
        """Make the adapter resident and active; read its files if it is not resident.

        Room is made only after the files were read, and before the adapter is taken in: a fault
        after that has cost another adapter its slot, and may leave this id behind as a zombie.

        Args:
            adapter: id, name and path.
            preread: what `read` gave for this path a moment ago, where the caller has it already.

        Raises:
            AdapterUnreadable: while reading.
            WorkerFault: after reading.
        """
        if adapter.id in self._cached and not adapter.load_inplace:
            self._cached.move_to_end(adapter.id)
            self._activate(adapter.id)
            return
        weights = preread or self._read(adapter.path)
        self.remove(adapter.id)
        if len(self._cached) >= self._max_cpu_loras:
            self.remove(self._oldest(self._cached))
        if weights.late_fault is not None and not weights.stays:
            raise WorkerFault(weights.late_fault)
        self._cached[adapter.id] = weights
        self._activate(adapter.id)
        if weights.late_fault is not None:
            raise WorkerFault(weights.late_fault)

    def _activate(self, adapter_id: int) -> None:
        if adapter_id not in self._active and len(self._active) >= self._max_loras:
            del self._active[self._oldest(self._active)]
        self._active[adapter_id] = None
        self._active.move_to_end(adapter_id)

    def _oldest(self, cache: OrderedDict[int, Weights] | OrderedDict[int, None]) -> int:
        for adapter_id in cache:
            if adapter_id not in self._pinned:
                return adapter_id
        raise WorkerFault("All items are pinned, cannot remove oldest from the cache.")

    def remove(self, adapter_id: int) -> bool:
        """Free the id's memory; return whether it had any."""
        self._active.pop(adapter_id, None)
        self._pinned.discard(adapter_id)
        return self._cached.pop(adapter_id, None) is not None

    def pin(self, adapter_id: int) -> None:
        """Keep the id in both caches until it is removed."""
        if adapter_id not in self._cached:
            raise WorkerFault(f"Pinning failed. LoRA {adapter_id} is not registered.")
        self._activate(adapter_id)
        self._pinned.add(adapter_id)
