"""The double's HTTP surface: vLLM 0.32's routes, gates and key.

For tests alone: `/_faults` scripts misbehaviour, `/_requests` counts the requests for each path.
"""

import asyncio
import contextlib
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from policyline.engines.simulated import answers, streams
from policyline.engines.simulated.engine import PauseMode, SimulatedRequest
from policyline.engines.simulated.faults import Fault, take
from policyline.engines.simulated.service import CallRefused, Service, failed
from policyline.engines.simulated.weights import AdapterUnreadable
from policyline.engines.simulated.worker import Adapter, WorkerFault

Answer = Callable[[HttpRequest], Awaitable[Response]]

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM's API key guards: nothing else."""


@dataclass(slots=True)
class Host:
    """What the routes need of the server around them.

    Attributes:
        service: the present process of the server.
        faults: the script of misbehaviour.
        drop: cuts the connection of a client, given as (host, port).
        restart: ends this process and begins another; it spares the connection of one client.
        stale: the registry as the fault `stale` shows it.
        requests: how often each path was asked for, over all processes.
    """

    service: Service
    faults: list[Fault]
    drop: Callable[[tuple[str, int]], None]
    restart: Callable[[tuple[str, int] | None], Awaitable[None]]
    stale: tuple[Adapter, ...] = ()
    requests: Counter[str] = field(default_factory=Counter)

    def script(self, fault: Fault) -> None:
        """Add a fault; `stale` remembers the registry of this moment."""
        if fault.kind == "stale":
            self.stale = tuple(self.service.registry.values())
        self.faults.append(fault)


def create_app(host: Host) -> ASGIApp:
    """Return the application; `host.service` may be replaced while it runs."""
    routes = Starlette(routes=_Routes(host).table())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """As in vLLM, the API key is checked before the route is looked for."""
        key, path = host.service.options.api_key, scope["path"]
        host.requests[path.rstrip("/")] += 1
        given = HttpRequest(scope).headers.get("authorization")
        refused = key and path.startswith(_GUARDED) and given != f"Bearer {key}"
        answer = JSONResponse({"error": "Unauthorized"}, 401) if refused else routes
        with contextlib.suppress(asyncio.CancelledError):  # killed: there is nobody to tell
            await answer(scope, receive, send)

    return app


class _Routes:
    """One method for each route."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def _service(self) -> Service:
        return self._host.service

    def table(self) -> list[Route]:
        """Return the routes."""
        lora, dev = "runtime_lora", "dev_mode"
        rows: list[tuple[str, str, Answer, str, str]] = [
            ("GET", "/health", self._health, "health", ""),
            ("GET", "/version", self._version, "version", ""),
            ("GET", "/metrics", self._metrics, "metrics", ""),
            ("GET", "/metrics/", self._some_metrics, "metrics", ""),
            ("GET", "/v1/models", self._models, "models", ""),
            ("POST", "/v1/completions", self._completions, "completions", ""),
            ("POST", "/v1/chat/completions", self._chat, "chat", ""),
            ("POST", "/v1/load_lora_adapter", self._load, "load", lora),
            ("POST", "/v1/unload_lora_adapter", self._unload, "unload", lora),
            ("GET", "/server_info", self._server_info, "server_info", dev),
            ("GET", "/is_paused", self._is_paused, "is_paused", dev),
            ("POST", "/pause", self._pause, "pause", dev),
            ("POST", "/resume", self._resume, "resume", dev),
            ("POST", "/collective_rpc", self._rpc, "collective_rpc", dev),
            ("POST", "/reset_prefix_cache", self._reset, "reset_prefix_cache", dev),
        ]
        return [
            *(
                Route(path, self._guard(call, answer, option), methods=[method])
                for method, path, answer, call, option in rows
            ),
            Route("/_faults", self._set_faults, methods=["POST", "DELETE"]),
            Route("/_requests", self._requests, methods=["GET"]),
        ]

    def _guard(self, call: str, answer: Answer, option: str) -> Answer:
        """Wrap a route in the option that opens it, scripted faults and vLLM's error bodies."""

        async def guarded(request: HttpRequest) -> Response:
            if option and not getattr(self._service.options, option):
                return JSONResponse({"detail": "Not Found"}, 404)
            try:
                return await self._misbehave(call, answer, request)
            except CallRefused as refused:
                return JSONResponse(answers.error_body(refused), refused.status)

        return guarded

    async def _misbehave(self, call: str, answer: Answer, request: HttpRequest) -> Response:
        fault = take(self._host.faults, call)
        request.state.fault = fault and fault.kind
        if fault is None:
            return await answer(request)
        match fault.kind:
            case "fail":
                raise CallRefused(fault.status, "InternalServerError", fault.message)
            case "hang":
                return await _never(request)
            case "delay":
                await asyncio.sleep(fault.delay_s)
            case "die":
                self._service.die()
            case "lose_reply":
                await answer(request)
                self._host.drop(_client(request))
                return await _never(request)
            case _:
                pass
        return await answer(request)

    async def _health(self, _request: HttpRequest) -> Response:
        return Response(status_code=503 if self._service.dead else 200)

    async def _version(self, _request: HttpRequest) -> Response:
        return JSONResponse({"version": answers.VERSION})

    async def _metrics(self, _request: HttpRequest) -> Response:
        return PlainTextResponse(answers.metrics_text(self._service))

    async def _some_metrics(self, request: HttpRequest) -> Response:
        """Like prometheus_client's application, which vLLM mounts: no names mean all."""
        names = request.query_params.getlist("name[]")
        text = answers.metrics_text(self._service)
        lines = [
            line for line in text.splitlines() if not names or re.split(r"[{ ]", line)[0] in names
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _models(self, request: HttpRequest) -> Response:
        adapters = tuple(self._service.registry.values())
        if request.state.fault == "stale":
            adapters = self._host.stale
        return JSONResponse(answers.models_body(self._service.options, adapters))

    async def _load(self, request: HttpRequest) -> Response:
        content = await _content(request)
        name, path = answers.require_strings(content, ("lora_name", "lora_path"))
        in_place = content.get("load_inplace") in {True, "yes", "true", "1"}
        await self._service.load(name, path, load_inplace=in_place)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: HttpRequest) -> Response:
        (name,) = answers.require_strings(await _content(request), ("lora_name",))
        await self._service.unload(name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _completions(self, request: HttpRequest) -> Response:
        return await self._complete(request, await _content(request), chat=False)

    async def _chat(self, request: HttpRequest) -> Response:
        content = streams.as_completion(await _content(request))
        return await self._complete(request, content, chat=True)

    async def _complete(
        self, request: HttpRequest, content: dict[str, Any], *, chat: bool
    ) -> Response:
        options = self._service.options
        # Like vLLM: no model, or an empty one, is the base model.
        name = content.get("model") or options.served_model_name
        adapter = self._service.registry.get(name)
        if adapter is None and name != options.served_model_name:
            known = ", ".join([options.served_model_name, *self._service.registry])
            text = f"The model `{name}` does not exist. Valid aliases: {known}."
            raise CallRefused(404, "NotFoundError", text, "model")
        work = answers.read_request(content, adapter, options)
        if request.state.fault == "as_base":
            work = replace(work, adapter=None)
        # Like vLLM: the client's own id, where it sends one.
        sent = request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        answer_id = f"{'chat' if chat else ''}cmpl-{sent}"
        if content.get("stream"):
            running = partial(self._generate, request, work)
            parts = streams.events(content, work, name, answer_id, chat=chat, running=running)
            return StreamingResponse(parts, media_type="text/event-stream; charset=utf-8")
        await self._generate(request, work)
        if request.state.fault == "nan":
            work.prompt_scores = [float("nan")]
        body = answers.completion_body(content, work, name, answer_id)
        return JSONResponse(streams.chat_body(body) if chat else body)

    async def _generate(self, request: HttpRequest, work: SimulatedRequest) -> None:
        """Run a request; it is cancelled when its client leaves, as vLLM aborts it then."""
        running = asyncio.ensure_future(self._service.generate(work))
        leaving = asyncio.ensure_future(_disconnected(request))
        leaving.add_done_callback(lambda _: running.cancel())
        try:
            await running
        finally:
            leaving.cancel()

    async def _server_info(self, _request: HttpRequest) -> Response:
        return JSONResponse(answers.server_info_body(self._service.options))

    async def _is_paused(self, _request: HttpRequest) -> Response:
        async def read() -> bool:
            return self._service.engine.paused is not None

        return JSONResponse({"is_paused": await self._service.ask_engine(read)})

    async def _pause(self, request: HttpRequest) -> Response:
        modes: tuple[PauseMode, ...] = get_args(PauseMode)
        asked = request.query_params.get("mode", "abort")
        for mode in modes:
            if mode == asked:
                await self._service.pause(mode)
                return JSONResponse({"status": "paused"})
        expected = "'abort', 'wait' or 'keep'"
        fault = {
            "type": "literal_error",
            "loc": "query.mode",
            "msg": f"Input should be {expected}",
            "input": asked,
            "ctx": {"expected": expected},
        }
        raise answers.invalid(str(fault), "query.mode")

    async def _resume(self, _request: HttpRequest) -> Response:
        async def act() -> None:
            self._service.engine.resume()

        await self._service.ask_engine(act)
        return JSONResponse({"status": "resumed"})

    async def _rpc(self, request: HttpRequest) -> Response:
        content = await _content(request)
        arguments = content.get("args", [])

        async def act() -> Any:
            worker = self._service.engine.worker
            match content.get("method"):
                case "list_loras":
                    return list(worker.resident_ids)
                case "remove_lora":
                    return str(worker.remove(*arguments))
                case "pin_lora":
                    worker.pin(*arguments)
                    return "True"
                case method:
                    raise WorkerFault(f"'Worker' object has no attribute {method!r}")

        try:
            return JSONResponse({"results": [await self._service.ask_engine(act)]})
        except (AdapterUnreadable, WorkerFault) as error:
            text = failed("collective_rpc", error)
            raise CallRefused(500, "InternalServerError", text) from error

    async def _reset(self, _request: HttpRequest) -> Response:
        async def act() -> None:
            self._service.engine.reset_prefix_cache()

        await self._service.ask_engine(act)
        return Response()

    async def _requests(self, _request: HttpRequest) -> Response:
        return JSONResponse(self._host.requests)

    async def _set_faults(self, request: HttpRequest) -> Response:
        """POST one fault (the fields of `Fault`) or `{"kind": "restart"}`; DELETE them all."""
        if request.method == "DELETE":
            self._host.faults.clear()
            return Response()
        content = await request.json()
        if content.get("kind") == "restart":
            await self._host.restart(_client(request))
            return Response()
        self._host.script(Fault(**content))
        return Response()


async def _content(request: HttpRequest) -> dict[str, Any]:
    body = await request.body()
    return answers.parse_object(request.headers.get("content-type", ""), body)


def _client(request: HttpRequest) -> tuple[str, int]:
    """Return (host, port) of the one who asks; over TCP uvicorn always has it."""
    assert request.client is not None
    return request.client.host, request.client.port


async def _never(request: HttpRequest) -> Response:
    """Wait until the client leaves; nobody gets this answer."""
    await _disconnected(request)
    return Response()


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
