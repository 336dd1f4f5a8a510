"""Processes of the fleet benchmark: `doubles COUNT` and `sidecars SETTINGS` (JSON).

Each prints one line when it is ready, and ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions
from policyline.ledger import Ledger
from policyline.storage import open_storage
from policyline.watcher import Sidecar, SidecarSettings
from policyline.watcher.vllm.client import EngineClient

LOAD_S = 0.005
THREADS_EACH = 6
"""What asyncio gives a sidecar that has a process of its own, on two processors."""


def main() -> None:
    """Run one part."""
    part, given = sys.argv[1], json.loads(sys.argv[2])
    parts: dict[str, Callable[[Any], Any]] = {"doubles": doubles, "sidecars": sidecars}
    asyncio.run(parts[part](given))


async def until_stdin_closes() -> None:
    """Return when the parent is gone or wants the end."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=wait, daemon=True).start()
    await closed.wait()


async def doubles(count: int) -> None:
    """Serve so many doubles; prints their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        options = ServiceOptions(EngineOptions(max_loras=6), load_delay_s=LOAD_S)
        servers = [await stack.enter_async_context(SimulatedServer(options)) for _ in range(count)]
        print(json.dumps([server.url for server in servers]), flush=True)
        await until_stdin_closes()


async def sidecars(given: dict[str, Any]) -> None:
    """Run one sidecar for each of `engines` (replica -> URL), each with a ledger of its own."""
    engines: dict[str, str] = given["engines"]
    pool = ThreadPoolExecutor(THREADS_EACH * len(engines))
    asyncio.get_running_loop().set_default_executor(pool)
    async with contextlib.AsyncExitStack() as stack:
        running = []
        for replica, url in engines.items():
            ledger = stack.enter_context(Ledger(given["ledger"], actor=f"bench@fleet:{replica}"))
            client = await stack.enter_async_context(EngineClient(url))
            cache = Path(given["caches"]) / replica
            settings = SidecarSettings(replica=replica, cache=cache, listen="127.0.0.1:0")
            running.append(Sidecar(settings, ledger, open_storage(given["storage"]), client))
        tasks = [asyncio.create_task(sidecar.run()) for sidecar in running]
        print(json.dumps(list(engines)), flush=True)
        stdin = asyncio.create_task(until_stdin_closes())
        await asyncio.wait([stdin, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for sidecar in running:
            sidecar.stop()
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    main()
