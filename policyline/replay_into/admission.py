"""Whether a server may be used for a replay; asks, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TypeVar

from policyline.ledger import Ledger
from policyline.replay_into.errors import NamesHeld, ServerGone, ServerInUse, ServerPaused
from policyline.replay_into.records import sidecar_beside
from policyline.watcher.errors import EngineRefusesUs, RuntimeLoadingOff
from policyline.watcher.vllm.answers import EngineInfo
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError, EngineUnauthorized

T = TypeVar("T")


async def admit(engine: EngineClient, ledger: Ledger, line: str) -> EngineInfo:
    """How the server was started, if it can be used.

    Raises:
        ServerInUse: a sidecar of the ledger serves with it.
        ServerPaused: it would answer no probe.
        ServerGone: it does not answer.
        RuntimeLoadingOff, EngineRefusesUs: it cannot be used.
    """
    url = engine.base_url
    beside = await asyncio.to_thread(sidecar_beside, ledger, line, url)
    if beside is not None:
        raise ServerInUse(
            f"{url} is served by sidecar {beside!r} of this ledger",
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


async def refuse_held(engine: EngineClient, names: Collection[str]) -> None:
    """Refuse a server that serves one of the names.

    Raises:
        NamesHeld: naming them, and how to free them.
        ServerGone: it does not answer.
    """
    url = engine.base_url
    models = await asked(engine, engine.models())
    held = sorted(a.name for a in models.adapters if a.name in names)
    if held:
        by_hand = unload_by_hand(url, held[0])
        raise NamesHeld(
            f"{url} serves {', '.join(held[:3])}{' and more' if held[3:] else ''} already",
            hint=f"use a server of its own, or restart this one; by hand: {by_hand}",
        )


def unload_by_hand(url: str, name: str) -> str:
    """The command that takes a name off a server."""
    return (
        f"curl -X POST {url}/v1/unload_lora_adapter -H 'Content-Type: application/json' "
        f'-d \'{{"lora_name": "{name}"}}\''
    )


async def asked(engine: EngineClient, call: Awaitable[T]) -> T:
    """Await a call without which there is no replay."""
    try:
        return await call
    except EngineUnauthorized as error:
        raise EngineRefusesUs(engine.base_url) from error
    except EngineError as error:
        raise ServerGone(
            f"{engine.base_url} does not answer: {error}",
            hint="start it, and give the same --state to go on",
        ) from error
