"""Whether a server may be used for a replay. Only reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TypeVar

from policyline.ledger import Ledger
from policyline.replay_into.errors import NamesInUse, ServerGone, ServerInUse, ServerPaused
from policyline.watcher.errors import EngineRefusesUs, RuntimeLoadingOff
from policyline.watcher.vllm.answers import EngineInfo
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError, EngineUnauthorized

T = TypeVar("T")


async def admit(engine: EngineClient, ledger: Ledger, line: str) -> EngineInfo:
    """Check that the server can be used; return how it was started.

    Raises:
        ServerInUse: a sidecar of the ledger manages it.
        ServerPaused: it answers no request.
        ServerGone: it does not answer.
        RuntimeLoadingOff, EngineRefusesUs: it cannot be used.
    """
    url = engine.base_url
    for row in await asyncio.to_thread(ledger.replicas, line):
        if row.state == "joined" and row.url.rstrip("/") == url.rstrip("/"):
            raise ServerInUse(
                f"{url} is served by sidecar {row.replica!r} of this ledger",
                hint="replay into a server of its own, or stop that sidecar first",
            )
    info = await asked(engine, engine.info())
    if info.runtime_lora is False:
        raise RuntimeLoadingOff(url)
    if info.dev_endpoints and await asked(engine, engine.is_paused()):
        raise ServerPaused(
            f"{url} is paused and answers no request",
            hint=f"if nobody needs that, resume it: curl -X POST {url}/resume",
        )
    return info


async def refuse_names_in_use(engine: EngineClient, names: Collection[str]) -> None:
    """Refuse a server that serves one of the names.

    Raises:
        NamesInUse: naming them, and how to free them.
        ServerGone: it does not answer.
    """
    url = engine.base_url
    models = await asked(engine, engine.models())
    used = sorted(a.name for a in models.adapters if a.name in names)
    if used:
        command = unload_command(url, used[0])
        raise NamesInUse(
            f"{url} serves {', '.join(used[:3])}{' and more' if used[3:] else ''} already",
            hint=f"use a server of its own, or restart this one; by hand: {command}",
        )


def unload_command(url: str, name: str) -> str:
    """The shell command that unloads a name from a server."""
    return (
        f"curl -X POST {url}/v1/unload_lora_adapter -H 'Content-Type: application/json' "
        f'-d \'{{"lora_name": "{name}"}}\''
    )


async def asked(engine: EngineClient, call: Awaitable[T]) -> T:
    """Await a call that the replay needs an answer to."""
    try:
        return await call
    except EngineUnauthorized as error:
        raise EngineRefusesUs(engine.base_url) from error
    except EngineError as error:
        raise ServerGone(
            f"{engine.base_url} does not answer: {error}",
            hint="start it, and run again with the same --state",
        ) from error
