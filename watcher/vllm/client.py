"""The watcher's only way to a vLLM server: one method for each call, each with its own time limit.

It returns the answers and decides nothing: no retries, no state. Behaviour and texts
are those of vLLM 0.32; `errors` classifies failures, `answers` parses.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import urlencode, urlsplit

import aiohttp

from policyline.watcher.settings import EngineTimeouts
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
from policyline.watcher.vllm.base_url import check_base_url
from policyline.watcher.vllm.errors import (
    AdapterRefused,
    EngineDead,
    EngineError,
    EngineFault,
    EngineTimeout,
    EngineUnreachable,
    Route,
    RouteMissing,
    RuntimeLoraDisabled,
    classify,
)

_KEEP_CONNECTION_S = 2.0
"""Reuse of an idle connection, in seconds. vLLM closes one after 5 s (its
VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent at that moment would be lost."""

_ALL_METRICS = "/metrics"
_SOME_METRICS = f"/metrics/?{urlencode([('name[]', name) for name in METRICS])}"
"""With the slash vLLM's mounted prometheus_client application answers, which heeds `name[]`: 350
bytes in 1.5 ms where the route without it writes 47 kB in 12 (vLLM 0.32)."""


class EngineRequest(NamedTuple):
    """What the server is asked; the path begins after the base URL."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    content: bytes | None = None


class EngineAnswer(NamedTuple):
    """What the server answered."""

    status: int
    text: str


class EngineClient:
    """Talks to one vLLM server.

    Close it with `aclose()` or `async with`. Use it from one event loop. Every method raises
    `EngineError`; a cancelled call closes its connection.

    Args:
        base_url: of the server, http or https; it may end in a path, not in `/v1`.
        api_key: sent to this server only; it never appears in a repr, an error or a log.
        timeouts: one time limit for each kind of call.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeouts: EngineTimeouts | None = None,
    ) -> None:
        self.base_url = check_base_url(base_url)
        self.timeouts = timeouts or EngineTimeouts()
        self._api_key = _header_value(api_key)
        parts = urlsplit(self.base_url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._in_flight: dict[asyncio.Timeout, None] = {}
        self._given_up: set[asyncio.Timeout] = set()
        self._http: aiohttp.ClientSession | None = None
        self._selects_metrics = True

    def __repr__(self) -> str:
        return f"EngineClient({self.base_url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

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
            await self._server_info(),
            await self.models(),
            runtime_lora=await self._has_load_route(),
        )

    async def _server_info(self) -> dict[str, Any] | None:
        try:
            text = await self._get("/server_info?config_format=json", "dev")
        except RouteMissing:
            return None
        content = read_json(text)
        return content if isinstance(content, dict) else None

    async def _has_load_route(self) -> bool:
        """Ask with an empty body: refused with 400 where the route exists, 404 where not."""
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

    async def give_up_if_dead(self) -> bool:
        """Fail every call in flight if nobody listens any more; return whether that is so.

        An engine of vLLM 0.32 that dies during a load never answers it, and the call keeps the
        dead process alive with its port closed.
        """
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                await self._knock()
        except ConnectionRefusedError:
            now = asyncio.get_running_loop().time()
            for limit in self._in_flight:
                limit.reschedule(now)
            self._given_up = set(self._in_flight)
            return True
        except (OSError, TimeoutError):
            return False
        return False

    async def _knock(self) -> None:
        """See whether somebody listens.

        Raises:
            OSError: no connection.
        """
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.transport.abort()

    async def wait_closed(self) -> None:
        """Return when the engine, or something between, closes a connection opened now.

        A restart or a death of the process is so known at once. Nothing is sent, and vLLM closes
        no connection on which nothing was asked. Cancel it to stop waiting.
        """
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls or None
                )
        except (OSError, TimeoutError) as error:
            raise EngineUnreachable(f"cannot connect to {self.base_url}: {error}") from error
        try:
            # The kernel then notices a machine that vanished without closing its connections.
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with contextlib.suppress(OSError):
                await reader.read(1)
        finally:
            writer.transport.abort()

    async def _get(self, path: str, route: Route = "plain", *, limit_s: float | None = None) -> str:
        limit_s = self.timeouts.observe_s if limit_s is None else limit_s
        return await self._ask(EngineRequest("GET", path), route, limit_s)

    async def _post(
        self,
        path: str,
        route: Route,
        limit_s: float,
        body: Mapping[str, Any] | None = None,
        *,
        last: bool = False,
    ) -> str:
        """POST `body` as JSON; `last` has the server close the connection after its answer."""
        headers = {"Connection": "close"} if last else {}
        if body is None:
            return await self._ask(EngineRequest("POST", path, headers), route, limit_s)
        headers["Content-Type"] = "application/json"
        content = json.dumps(body).encode()
        return await self._ask(EngineRequest("POST", path, headers, content), route, limit_s)

    async def _ask(self, request: EngineRequest, route: Route, limit_s: float) -> str:
        call = f"{request.method} {self.base_url}{request.path}"
        limit = asyncio.timeout(limit_s)
        self._in_flight[limit] = None
        try:
            async with limit:
                answer = await self._send(request)
        except aiohttp.ClientError as error:  # some are a TimeoutError as well
            raise EngineUnreachable(f"{call}: {_cause(error)}") from error
        except TimeoutError as error:
            if limit in self._given_up:
                raise EngineDead(f"{call}: nobody listens at {self.base_url} any more") from error
            raise EngineTimeout(f"no answer to {call} within {limit_s:g} s") from error
        finally:
            del self._in_flight[limit]
            self._given_up.discard(limit)
        if answer.status >= 300:
            raise self._failure(route, answer)
        return answer.text

    async def _send(self, request: EngineRequest) -> EngineAnswer:
        """One request and its whole answer.

        Raises:
            aiohttp.ClientError: no connection, or it broke.
        """
        if self._http is None:
            self._http = self._session()
        async with self._http.request(
            request.method,
            self.base_url + request.path,
            headers=request.headers,
            data=request.content,
            allow_redirects=False,
        ) as answer:
            return EngineAnswer(answer.status, await answer.text(errors="replace"))

    def _session(self) -> aiohttp.ClientSession:
        """Made inside the event loop, as aiohttp demands."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_CONNECTION_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.timeouts.connect_s),
        )

    def _failure(self, route: Route, answer: EngineAnswer) -> EngineError:
        text = answer.text
        if self._api_key is not None:
            text = text.replace(self._api_key, "***")
        if answer.status < 400:
            return EngineFault(f"unexpected redirect: {text}", status=answer.status)
        return classify(route, answer.status, text)


def _header_value(api_key: str | None) -> str | None:
    """The key as a header can carry it; a mounted secret often ends with a line end.

    Raises:
        ValueError: a header cannot carry it.
    """
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the API key holds a character that an HTTP header cannot carry")
    return key or None


def _cause(error: aiohttp.ClientError) -> str:
    """In the words of the system where it has some."""
    if isinstance(error, aiohttp.ClientOSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
