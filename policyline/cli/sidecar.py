"""`policyline sidecar`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import socket
from typing import Annotated
from urllib.parse import urlsplit

import typer

from policyline.cli.command import Options
from policyline.cli.options import LedgerOption, StorageOption, create_missing, default_cache
from policyline.ledger import Ledger
from policyline.storage import open_storage
from policyline.watcher.settings import EngineTimeouts, SidecarSettings

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
EPILOG = """
Examples:

    policyline sidecar --vllm http://127.0.0.1:8000 --storage /mnt/policies --ledger ledger.db

    POLICYLINE_VLLM_API_KEY=... policyline sidecar --vllm http://127.0.0.1:8000 \\
        --storage /mnt/policies --ledger postgresql://me@db/policies --replica gpu-3

vLLM needs --enable-lora, --max-loras of at least max_staleness + 2, and
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment.
"""


def sidecar(
    vllm: Annotated[
        str, typer.Option(envvar="POLICYLINE_VLLM", help="Base URL of the vLLM server.")
    ],
    storage: StorageOption,
    ledger: LedgerOption,
    options: Options[SidecarSettings],
    timeouts: Options[EngineTimeouts],
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_VLLM_API_KEY",
            help="vLLM's API key. Better in the environment: others see a command's flags.",
        ),
    ] = None,
) -> None:
    """Run next to one vLLM server: fetch, verify, load, probe, acknowledge and evict versions.

    A SQLite ledger and a storage directory that are not there yet are created. Ends with 0 on
    SIGTERM or Ctrl-C, after it has left the fleet in the ledger.
    """
    _share_one_arena()
    replica = options.given["replica"] or _default_replica(vllm)
    advertise = options.given["advertise"]
    settings = options.build(
        replica=replica,
        cache=options.given["cache"] or default_cache(replica),
        advertise=advertise and advertise.rstrip("/"),
    )
    asyncio.run(_run(settings, timeouts.build(), vllm, storage, ledger, api_key))


async def _run(
    settings: SidecarSettings,
    timeouts: EngineTimeouts,
    vllm: str,
    storage: str,
    ledger: str,
    api_key: str | None,
) -> None:
    """Wire the parts and serve until a signal."""
    # imported late: an HTTP server and client are no business of the other commands
    from policyline.watcher import Sidecar  # noqa: PLC0415 - see above
    from policyline.watcher.vllm.client import EngineClient  # noqa: PLC0415 - see above

    try:
        engine = EngineClient(vllm, api_key=api_key, timeouts=timeouts)
    except ValueError as error:
        raise typer.BadParameter(f"--vllm: {error}") from error
    create_missing(ledger, storage)
    async with engine:
        bytes_at = open_storage(storage)
        bytes_at.names()  # an unreadable storage is an error now, not when a version comes
        with Ledger(ledger) as opened:
            running = Sidecar(settings, opened, bytes_at, engine)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, running.stop)
            await running.run()


def _share_one_arena() -> None:
    """Have all threads allocate from one heap, where there is glibc; before the first thread.

    Each thread has an arena otherwise, and what it freed is not given back: over 1,000 versions a
    sidecar grew by 3 to 13 MB, with one or two arenas by 3 to 6.
    """
    with contextlib.suppress(OSError, AttributeError):  # macOS and musl have no such function
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _default_replica(vllm: str) -> str:
    try:
        port = urlsplit(vllm).port
    except ValueError as error:
        raise typer.BadParameter(f"--vllm {vllm!r} is not a URL") from error
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
    return f"{host}-{port or 80}"
