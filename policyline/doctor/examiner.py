"""The engine client with the questions that only an examination asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from policyline.watcher.vllm.answers import read_field
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import AdapterMissing, RequestRefused

_ONE_TOKEN: Final[Mapping[str, Any]] = {"prompt": [1], "max_tokens": 1}


class Examiner(EngineClient):
    """Asks one thing at a time, so that one missing answer hides no other."""

    async def version(self) -> str:
        """The release, as GET /version reports it."""
        return str(read_field(await self._get("/version"), "version"))

    async def metrics(self) -> str:
        """The text of GET /metrics."""
        return await self._get("/metrics")

    async def server_info(self) -> Mapping[str, Any] | None:
        """GET /server_info?config_format=json; None without development routes."""
        return await self._server_info()

    async def has_load_route(self) -> bool:
        """Whether adapters can be loaded at run time, judged by its route."""
        return await self._has_load_route()

    async def serves_unknown(self, name: str) -> bool:
        """Whether a request for a model that does not exist is answered all the same."""
        return await self._answers({**_ONE_TOKEN, "model": name})

    async def serves_nameless(self) -> bool:
        """Whether a request without a model is answered: by the base model, in vLLM 0.32."""
        return await self._answers(_ONE_TOKEN)

    async def _answers(self, body: Mapping[str, Any]) -> bool:
        limit_s = self.timeouts.score_s
        try:
            await self._post("/v1/completions", "completion", limit_s, body)
        except (AdapterMissing, RequestRefused):
            return False
        return True
