"""The watcher's only way to a vLLM server: one method for each call, each with its own time limit.

It returns the answers and decides nothing: no retries, no state. Behaviour and texts
are those of vLLM 0.32; `errors` classifies failures, `answers` parses.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlencode

from policyline.watcher.vllm.answers import (
    METRICS,
    Completion,
    EngineInfo,
    EngineModels,
    EngineSnapshot,
    has_incarnation,
    read_busy,
    read_completion,
    read_field,
    read_incarnation,
    read_info,
    read_json,
    read_max_loras,
    read_models,
    read_results,
    read_scores,
    read_stepped,
)
from policyline.watcher.vllm.connection import EngineConnection
from policyline.watcher.vllm.errors import (
    AdapterRefused,
    EngineError,
    EngineFault,
    RouteMissing,
    RuntimeLoraDisabled,
)

_ALL_METRICS = "/metrics"
_SOME_METRICS = f"/metrics/?{urlencode([('name[]', name) for name in METRICS])}"
"""With the slash vLLM's mounted prometheus_client application answers, which heeds `name[]`: 350
bytes in 1.5 ms where the route without it writes 47 kB in 12 (vLLM 0.32)."""


class EngineClient(EngineConnection):
    """The calls to one vLLM server; arguments as for `EngineConnection`.

    Every method raises `EngineError`; a cancelled call closes its connection.
    """

    _selects_metrics = True
    """Whether the server's metrics can be narrowed to some names; until it shows that not."""

    async def incarnation(self) -> str:
        """Return the server's process start time, exactly as its metrics print it."""
        return read_incarnation(await self._metrics())

    async def models(self) -> EngineModels:
        """Return the registry (GET /v1/models)."""
        return read_models(read_json(await self._get("/v1/models")))

    async def snapshot(self) -> EngineSnapshot:
        """Observe the engine in two requests: first /metrics, then /v1/models.

        After a restart between the two, the new process's registry is paired with the old
        incarnation, never the other way round: no ack is credited to a process that lacks it.
        """
        metrics = await self._metrics()
        return EngineSnapshot(
            incarnation=read_incarnation(metrics),
            models=await self.models(),
            busy=read_busy(metrics),
            stepped=read_stepped(metrics),
            max_loras=read_max_loras(metrics),
        )

    async def _metrics(self) -> str:
        """The metrics that are read here; all of them, from a server that does not select."""
        if self._selects_metrics:
            try:
                text = await self._get(_SOME_METRICS)
            except EngineError as error:
                if error.status is None:
                    raise
                if error.status >= 500:  # of this route alone, perhaps, and perhaps only now
                    return await self._get(_ALL_METRICS)
            else:
                if has_incarnation(text):
                    return text
        text = await self._get(_ALL_METRICS)
        self._selects_metrics &= not has_incarnation(text)
        return text

    async def load(self, name: str, path: str) -> None:
        """Load the adapter at `path`, a path on the engine's machine, under `name`.

        vLLM reads the files at once, inside its step loop. After `EngineTimeout` or
        `AdapterAlreadyLoaded` the name may be served: read the registry and compare the path.
        """
        body = {"lora_name": name, "lora_path": path}
        await self._post("/v1/load_lora_adapter", "load", self.timeouts.load_s, body)

    async def unload(self, name: str) -> None:
        """Take `name` from the registry; requests on it finish, and its memory is not freed."""
        body = {"lora_name": name}
        await self._post("/v1/unload_lora_adapter", "unload", self.timeouts.unload_s, body)

    async def score(self, model: str, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Return log p(token i | tokens before i) for i >= 1, under `model`.

        One value fewer than `token_ids`. Temperature and prefix cache have no part in it. It is an
        ordinary request: it touches the engine's LRU caches and generates one token.

        Raises:
            NonFinite: a value is NaN or infinite.
            AdapterMissing: the engine does not serve `model`.
        """
        body = {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._complete(model, body, self.timeouts.score_s)
        return read_scores(answer, len(token_ids) - 1)

    async def complete(
        self, model: str, prompt: str | Sequence[int], max_tokens: int, **sampling: Any
    ) -> Completion:
        """Generate at most `max_tokens` tokens under `model`.

        `sampling` goes into the request as it is (`temperature`, `seed`, `stop`, ...).

        Raises:
            AdapterMissing: the engine does not serve `model`.
        """
        body = {
            **sampling,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "return_token_ids": True,
        }
        return read_completion(await self._complete(model, body, self.timeouts.complete_s))

    async def _complete(self, model: str, body: Mapping[str, Any], limit_s: float) -> Any:
        if not model:
            # vLLM answers a request without a model with its base model.
            raise ValueError("a completion needs the name of a model")
        text = await self._post("/v1/completions", "completion", limit_s, {**body, "model": model})
        answer = read_json(text)
        if not isinstance(answer, dict) or answer.get("model") != model:
            raise EngineFault(f"a request for {model!r} was answered by another model")
        return answer

    async def info(self) -> EngineInfo:
        """Return how the server was started, in at most four requests."""
        return read_info(
            str(read_field(await self._get("/version"), "version")),
            await self.server_info(),
            await self.models(),
            runtime_lora=await self.has_load_route(),
        )

    async def server_info(self) -> dict[str, Any] | None:
        """Return the configuration it was started with; None without development routes."""
        try:
            text = await self._get("/server_info?config_format=json", "dev")
        except RouteMissing:
            return None
        content = read_json(text)
        return content if isinstance(content, dict) else None

    async def has_load_route(self) -> bool:
        """Return whether adapters can be loaded at run time.

        Asked with an empty body: refused with 400 where the route exists, 404 where not.
        """
        try:
            await self._post("/v1/load_lora_adapter", "load", self.timeouts.observe_s, {})
        except AdapterRefused:
            return True
        except RuntimeLoraDisabled:
            return False
        raise EngineFault("the engine took a load without a name")

    async def is_paused(self, *, limit_s: float | None = None) -> bool:
        """Return whether generation is paused. Development route.

        The engine itself answers, between two steps, so a slow load or a hang delays it.
        """
        limit_s = self.timeouts.control_s if limit_s is None else limit_s
        text = await self._get("/is_paused", "dev", limit_s=limit_s)
        return bool(read_field(text, "is_paused"))

    async def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        """Stop generation: end requests in flight, wait for them, or freeze them."""
        await self._post(f"/pause?mode={mode}", "dev", self.timeouts.control_s)

    async def resume(self) -> None:
        """Go on with generation. Development route."""
        await self._post("/resume", "dev", self.timeouts.control_s)

    async def resident_ids(self) -> frozenset[int]:
        """Return the ids of the adapters in the workers' memory. Development route.

        vLLM returns no names: compare the ids before and after a load.
        """
        workers = await self._rpc("list_loras")
        return frozenset(resident for worker in workers for resident in worker)

    async def remove_resident(self, adapter_id: int) -> bool:
        """Free one adapter's memory in every worker; return whether any had it.

        A later request on a name still in the registry reads the files again. Development route.
        """
        workers = await self._rpc("remove_lora", adapter_id)
        return any(str(removed) == "True" for removed in workers)

    async def _rpc(self, method: str, *args: int) -> list[Any]:
        body = {"method": method, "args": list(args)}
        limit_s = self.timeouts.control_s
        # After an error inside this call vLLM 0.32 drops the connection without saying so.
        text = await self._post("/collective_rpc", "dev", limit_s, body, last=True)
        return read_results(read_json(text))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Development route."""
        await self._post("/reset_prefix_cache", "dev", self.timeouts.control_s)
