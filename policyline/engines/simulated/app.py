"""The double's HTTP surface: vLLM 0.32's routes, gates and key.

For tests alone: `/_faults` scripts misbehaviour, `/_requests` counts the requests for each path.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from policyline.engines.simulated import answers, streams
from policyline.engines.simulated.engine import PauseMode, SimulatedRequest
from policyline.engines.simulated.faults import Fault
from policyline.engines.simulated.host import Host, KeyGate
from policyline.engines.simulated.service import CallRefused, Service, failed
from policyline.engines.simulated.weights import AdapterUnreadable
from policyline.engines.simulated.worker import WorkerFault

Answer = Callable[[HttpRequest], Awaitable[Response]]


def create_app(host: Host) -> ASGIApp:
    """Return the application; `host.service` may be replaced while it runs."""
    return KeyGate(Starlette(routes=_Routes(host).table()), host)


class _Routes:
    """One method for each route."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def _service(self) -> Service:
        return self._host.service

    def table(self) -> list[Route]:
        """Return the routes; gates are looked up at each call."""
        plain: list[tuple[str, str, str, Answer]] = [
            ("GET", "/health", "health", self._health),
            ("GET", "/version", "version", self._version),
            ("GET", "/metrics", "metrics", self._metrics),
            ("GET", "/metrics/", "metrics", self._some_metrics),
            ("GET", "/v1/models", "models", self._models),
            ("POST", "/v1/completions", "completions", self._completions),
            ("POST", "/v1/chat/completions", "chat", self._chat),
        ]
        lora: list[tuple[str, str, str, Answer]] = [
            ("POST", "/v1/load_lora_adapter", "load", self._load),
            ("POST", "/v1/unload_lora_adapter", "unload", self._unload),
        ]
        dev: list[tuple[str, str, str, Answer]] = [
            ("GET", "/server_info", "server_info", self._server_info),
            ("GET", "/is_paused", "is_paused", self._is_paused),
            ("POST", "/pause", "pause", self._pause),
            ("POST", "/resume", "resume", self._resume),
            ("POST", "/collective_rpc", "collective_rpc", self._rpc),
            ("POST", "/reset_prefix_cache", "reset_prefix_cache", self._reset),
        ]

        def make(row: tuple[str, str, str, Answer], gate: Callable[[], bool]) -> Route:
            method, path, call, answer = row
            return Route(path, self._guard(call, answer, gate), methods=[method])

        return [
            *(make(row, lambda: True) for row in plain),
            *(make(row, lambda: self._service.options.runtime_lora) for row in lora),
            *(make(row, lambda: self._service.options.dev_mode) for row in dev),
            Route("/_faults", self._set_faults, methods=["POST", "DELETE"]),
            Route("/_requests", self._requests, methods=["GET"]),
        ]

    def _guard(self, call: str, answer: Answer, gate: Callable[[], bool]) -> Answer:
        """Wrap a route in its gate, the scripted faults and vLLM's error bodies."""

        async def guarded(request: HttpRequest) -> Response:
            if not gate():
                return JSONResponse({"detail": "Not Found"}, 404)
            try:
                return await self._misbehave(call, answer, request)
            except CallRefused as refused:
                return JSONResponse(answers.error_body(refused), refused.status)

        return guarded

    async def _misbehave(self, call: str, answer: Answer, request: HttpRequest) -> Response:
        fault = self._host.faults.take(call)
        if fault is None:
            return await answer(request)
        request.state.fault = fault
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
        if _fault(request) == "stale":
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
        if _fault(request) == "as_base":
            work = replace(work, adapter=None)
        # Like vLLM: the client's own id, where it sends one.
        sent = request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        answer_id = f"{'chat' if chat else ''}cmpl-{sent}"
        if content.get("stream"):
            running = partial(self._generate, request, work)
            parts = streams.events(content, work, name, answer_id, chat=chat, running=running)
            return StreamingResponse(parts, media_type="text/event-stream; charset=utf-8")
        if not await self._generate(request, work):
            return Response(status_code=499)
        if _fault(request) == "nan":
            work.prompt_scores = [float("nan")]
        body = answers.completion_body(content, work, name, answer_id)
        return JSONResponse(streams.chat_body(body) if chat else body)

    async def _generate(self, request: HttpRequest, work: SimulatedRequest) -> bool:
        """Run a request; return False when the client left before its end, as vLLM aborts then."""
        running = asyncio.ensure_future(self._service.generate(work))
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            running.cancel()
            raise
        finally:
            leaving.cancel()
        if not running.done():
            running.cancel()
            return False
        running.result()
        return True

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


def _fault(request: HttpRequest) -> str | None:
    fault: Fault | None = getattr(request.state, "fault", None)
    return None if fault is None else fault.kind
