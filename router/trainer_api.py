"""The vLLM control API that an unmodified trainer expects, below /t/<run>.

TRL 1.16's AsyncGRPOTrainer calls `/health`, `/v1/models` and `/server_info` once, and then for each
version `/pause`, `/v1/load_lora_adapter`, `/resume`, `/v1/unload_lora_adapter`. No engine is
paused: versions are immutable, so a request in flight can never see half of an update.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from policyline.ledger.errors import LedgerError, LedgerUnavailable
from policyline.ledger.names import policy_name
from policyline.ledger.rows import ReplicaRow
from policyline.router.answers import HttpRefused
from policyline.router.errors import UpstreamUnreachable
from policyline.router.request import parse_body, read_body
from policyline.router.settings import RouterSettings
from policyline.router.status import RouterStatus
from policyline.router.trainer_backend import TrainerBackend
from policyline.router.upstream import Upstream
from policyline.router.view import ViewCache

log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = 64 << 10
_Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]


class TrainerApi:
    """Answers a trainer's control requests.

    Args:
        settings: of the router.
        trainer: publishes what the trainer loads.
        view_cache: lists the replicas.
        status: knows whether the router drains.
        upstream: asks a replica about its engine.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        trainer: TrainerBackend,
        view_cache: ViewCache,
        status: RouterStatus,
        upstream: Upstream,
    ) -> None:
        self._settings = settings
        self._trainer = trainer
        self._view_cache = view_cache
        self._status = status
        self._upstream = upstream
        self._paused: set[str] = set()
        self._handlers: dict[tuple[str, str], _Handler] = {
            ("GET", "/health"): self._health,
            ("HEAD", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_world_size"): self._world_size,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/v1/load_lora_adapter"): self._load,
            ("POST", "/v1/unload_lora_adapter"): self._unload,
        }

    async def answer(self, request: web.BaseRequest, run: str, path: str) -> web.StreamResponse:
        """Answer one request of the trainer of `run`.

        Raises:
            HttpRefused: with this answer.
            LedgerUnavailable: it does not answer.
        """
        handler = self._handlers.get((request.method, path))
        if handler is None:
            asked = f"{request.method} {request.path[:200]}"
            raise HttpRefused(404, "no_such_route", f"{asked} is not served here")
        try:
            return await handler(request, run)
        except LedgerUnavailable:
            raise
        except LedgerError as error:
            raise HttpRefused(409, "ledger_refuses", str(error)) from error

    async def _health(self, _request: web.BaseRequest, _run: str) -> web.StreamResponse:
        """Counts replicas, not versions: a trainer waits for this before it publishes anything."""
        joined = self._view_cache.joined()
        ready = len(joined) >= self._settings.min_ready and not self._status.draining
        return web.json_response({"healthy": ready, "joined": joined}, status=200 if ready else 503)

    async def _models(self, _request: web.BaseRequest, _run: str) -> web.StreamResponse:
        """The base model's card; the trainer reads `max_model_len` from the first card."""
        cards = (await self._ask("/v1/models"))["data"]
        base = [card for card in cards if card.get("parent") is None]
        return web.json_response({"object": "list", "data": base})

    async def _server_info(self, request: web.BaseRequest, _run: str) -> web.StreamResponse:
        """A replica's answer, with the smallest number of adapter slots in the fleet."""
        info = await self._ask(f"/server_info?{request.query_string}")
        lora = info["vllm_config"].get("lora_config")
        slots = [r.max_loras for r in self._rows() if r.max_loras is not None]
        if lora is not None and slots:
            lora["max_loras"] = min([lora["max_loras"], *slots])
        return web.json_response(info)

    async def _world_size(self, _request: web.BaseRequest, _run: str) -> web.StreamResponse:
        return web.json_response({"world_size": 1})

    async def _is_paused(self, _request: web.BaseRequest, run: str) -> web.StreamResponse:
        return web.json_response({"is_paused": run in self._paused})

    async def _pause(self, _request: web.BaseRequest, run: str) -> web.StreamResponse:
        if await self._trainer.pause(run):
            self._paused.add(run)
        return web.json_response({"status": "paused"})

    async def _resume(self, _request: web.BaseRequest, run: str) -> web.StreamResponse:
        await self._trainer.resume(run)
        self._paused.discard(run)
        return web.json_response({"status": "resumed"})

    async def _load(self, request: web.BaseRequest, run: str) -> web.StreamResponse:
        content = await _content(request)
        name, path = content.get("lora_name"), content.get("lora_path")
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            raise HttpRefused(
                400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."
            )
        if name == self._settings.alias:
            raise HttpRefused(
                400,
                "InvalidUserInput",
                f"{name!r} is this router's name for current, so nothing else can be asked for by "
                "it; load the adapter under another name, or start the router with another --alias",
            )
        version = await self._trainer.load(run, name, path)
        log.info(
            "trainer adapter %s of run %s is %s",
            name,
            run,
            policy_name(self._settings.line, version),
            extra={"event": "trainer_loaded", "run": run, "version": version},
        )
        return web.Response(
            text=f"Success: LoRA adapter '{name}' added successfully.",
            headers={"x-policy-version": str(version)},
        )

    async def _unload(self, request: web.BaseRequest, run: str) -> web.StreamResponse:
        name = (await _content(request)).get("lora_name")
        if not isinstance(name, str) or not name:
            raise HttpRefused(
                400,
                "InvalidUserInput",
                "'lora_name' needs to be provided to unload a LoRA adapter.",
            )
        # the window decides what is unloaded
        log.info(
            "run %s no longer needs %s", run, name, extra={"event": "trainer_unloaded", "run": run}
        )
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    def _rows(self) -> list[ReplicaRow]:
        rows = self._view_cache.view.replicas.values()
        return [r for r in rows if r.state == "joined" and r.url]

    async def _ask(self, path: str) -> Any:
        """The answer of the first replica."""
        rows = self._rows()
        if not rows:
            message = "no replica has joined the line"
            raise HttpRefused(503, "no_replica", message, retry_after_s=1)
        try:
            return await self._upstream.get_json(rows[0].url + path)
        except UpstreamUnreachable as error:
            raise HttpRefused(503, "replica_unreachable", str(error), retry_after_s=1) from error


async def _content(request: web.BaseRequest) -> Mapping[str, Any]:
    return parse_body(await read_body(request, _MAX_BODY_BYTES))
