"""The double's server process without HTTP: registry of names, input queue, engine loop."""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from policyline.engines.simulated.engine import (
    EngineDied,
    EngineOptions,
    PauseMode,
    SimulatedEngine,
    SimulatedRequest,
)
from policyline.engines.simulated.weights import (
    AdapterLimits,
    AdapterNotFound,
    AdapterUnreadable,
    read_weights,
)
from policyline.engines.simulated.worker import Adapter, WorkerFault

_T = TypeVar("_T")

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How the double's server is started."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    served_model_name: str = "tiny"
    model: str = "tiny"
    """Path of the base model, as shown in the registry; it need not exist."""
    hidden_size: int | None = None
    """Adapters are checked against it as vLLM does; None: not."""
    layers: int | None = None
    """Tensors of layers beyond it have no effect, as in vLLM; None: all have."""
    enable_lora: bool = True
    runtime_lora: bool = True
    """As VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    dev_mode: bool = True
    """As VLLM_SERVER_DEV_MODE."""
    api_key: str | None = None
    load_delay_s: float = 0.0
    """Duration of a load, the reading of the files included; the engine loop stands meanwhile."""
    step_delay_s: float = 0.0
    """Duration of a step: one token of every request in the batch."""

    @property
    def limits(self) -> AdapterLimits:
        """What adapters are checked against."""
        return AdapterLimits(self.engine.max_lora_rank, self.hidden_size, self.layers)


class CallRefused(Exception):
    """An answer other than 200, with vLLM's body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        super().__init__(message)


class Service:
    """One process of the double's server: made at its start, gone with its death.

    Args:
        options: how it is started.
        on_death: called once when the engine has died.
        now: unix time in seconds.
    """

    def __init__(
        self,
        options: ServiceOptions,
        on_death: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self.registry: dict[str, Adapter] = {}
        self._read = partial(read_weights, limits=options.limits)
        self.engine = SimulatedEngine(options.engine, self._read, now)
        self.started_at = now()
        self.dead = False
        self._on_death = on_death
        self._ids = 0
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._inputs: deque[Callable[[], Awaitable[None]]] = deque()
        self._wake = asyncio.Event()
        self._results: dict[int, asyncio.Future[None]] = {}
        self._drained: list[asyncio.Future[None]] = []
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the engine loop; calls in flight are never answered."""
        self._loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop

    async def load(self, name: str, path: str, *, load_inplace: bool = False) -> None:
        """Take an adapter into the worker, then into the registry."""
        async with self._locks[name]:
            self._check_load(name, path, load_inplace=load_inplace)
            known = self.registry.get(name)
            if known is None:
                self._ids += 1
            adapter = Adapter(known.id if known else self._ids, name, path, load_inplace)
            try:
                await self.ask_engine(lambda: self._add(adapter))
            except AdapterNotFound as error:
                text = f"Loading lora {name} failed: No adapter found for {path}"
                raise CallRefused(404, "NotFoundError", text) from error
            except (AdapterUnreadable, WorkerFault) as error:
                raise CallRefused(500, "InternalServerError", failed("add_lora", error)) from error
            self.registry[name] = adapter

    def _check_load(self, name: str, path: str, *, load_inplace: bool) -> None:
        invalid = "InvalidUserInput"
        if not name or not path:
            raise CallRefused(400, invalid, "Both 'lora_name' and 'lora_path' must be provided.")
        if name == self.options.served_model_name:
            text = f"The lora adapter '{name}' conflicts with a served base model."
            raise CallRefused(400, invalid, text)
        if name in self.registry and not load_inplace:
            text = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
            raise CallRefused(400, invalid, text)

    async def _add(self, adapter: Adapter) -> None:
        due = asyncio.get_running_loop().time() + self.options.load_delay_s
        if not self.options.enable_lora:
            raise WorkerFault("LoRA is not enabled. Use --enable-lora to enable LoRA.")
        # In a thread: one event loop may serve dozens of doubles.
        preread = await asyncio.to_thread(self._read, adapter.path)
        remaining_s = due - asyncio.get_running_loop().time()
        if remaining_s > 0:
            await asyncio.sleep(remaining_s)
        self.engine.worker.add(adapter, preread)

    async def unload(self, name: str) -> None:
        """Take an adapter from the registry alone."""
        async with self._locks[name]:
            if not name:
                text = "'lora_name' needs to be provided to unload a LoRA adapter."
                raise CallRefused(400, "InvalidUserInput", text)
            if name not in self.registry:
                text = f"The lora adapter '{name}' cannot be found."
                raise CallRefused(404, "NotFoundError", text)
            del self.registry[name]

    async def generate(self, request: SimulatedRequest) -> None:
        """Run a request to its end; it is withdrawn when the caller is cancelled."""
        if self.dead:
            raise CallRefused(500, "InternalServerError", DEAD)
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._results[id(request)] = result

        async def submit() -> None:
            self.engine.submit(request)

        self._put(submit)
        try:
            await result
        except asyncio.CancelledError:
            self.engine.withdraw(request)
            raise
        finally:
            self._results.pop(id(request), None)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generation; with `wait`, return when the running requests have ended."""

        async def act() -> None:
            self._finish(self.engine.pause(mode))

        await self.ask_engine(act)
        if mode == "wait" and self.engine.running:
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            await drained

    async def ask_engine(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Run `call` between two steps, as vLLM's utility calls; it never returns from the dead."""
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        async def act() -> None:
            try:
                result = await call()
            except (AdapterUnreadable, WorkerFault) as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)

        self._put(act)
        return await answer

    def _put(self, act: Callable[[], Awaitable[None]]) -> None:
        self._inputs.append(act)
        self._wake.set()

    async def _run(self) -> None:
        while self._alive():
            self._wake.clear()
            # vLLM empties its whole input queue before each step (v1/engine/core.py): a burst of
            # loads can so push out even an adapter that is decoding.
            while self._inputs and self._alive():
                await self._inputs.popleft()()
            if not self._alive():
                return
            if not self.engine.has_work:
                await self._wake.wait()
                continue
            try:
                ended = self.engine.step()
            except EngineDied:
                self.die()
                return
            await asyncio.sleep(self.options.step_delay_s)
            self._finish(ended)

    def _alive(self) -> bool:
        return not self.dead

    def _finish(self, requests: list[SimulatedRequest]) -> None:
        for request in requests:
            result = self._results.get(id(request))
            if result is not None and not result.done():
                result.set_result(None)
        if self._drained and not self.engine.running:
            for drained in self._drained:
                drained.set_result(None)
            self._drained.clear()

    def die(self) -> None:
        """Kill the engine: requests in flight fail, other calls in flight are never answered."""
        if self.dead:
            return
        self.dead = True
        for result in self._results.values():
            if not result.done():
                result.set_exception(CallRefused(500, "InternalServerError", DEAD))
        self._wake.set()
        self._on_death()


def failed(method: str, error: Exception) -> str:
    """Return vLLM's text for an error in the worker."""
    return (
        f"Call to {method} method failed: Worker failed with error '{error}', please check the "
        "stack trace above for the root cause"
    )
