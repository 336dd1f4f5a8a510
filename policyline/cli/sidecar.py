"""`policyline sidecar`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from policyline.cli.options import (
    LedgerOption,
    LineOption,
    StorageOption,
    default_cache,
    listen_address,
)
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE
from policyline.storage import open_storage

if TYPE_CHECKING:
    from policyline.watcher import SidecarSettings

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


def add_to(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(epilog=EPILOG)(sidecar)


def sidecar(
    vllm: Annotated[
        str, typer.Option(envvar="POLICYLINE_VLLM", help="Base URL of the vLLM server.")
    ],
    storage: StorageOption,
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    advertise: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_ADVERTISE",
            metavar="URL",
            help="Where routers reach this vLLM, if not at --vllm: the URL of an exposed port.",
            show_default=False,
        ),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_REPLICA",
            help="Name of this vLLM server in the ledger. Default: HOSTNAME-PORT of --vllm.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_CACHE",
            help="Directory for local copies, on a disk that vLLM reads under the same path. "
            "Default: ~/.cache/policyline/REPLICA.",
            show_default=False,
        ),
    ] = None,
    cache_limit: Annotated[
        int | None,
        typer.Option(
            envvar="POLICYLINE_CACHE_LIMIT",
            min=1,
            metavar="BYTES",
            help="The most that local copies may take; what vLLM may read again always stays. "
            "Default: what the disk holds.",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            envvar="POLICYLINE_LISTEN",
            metavar="HOST:PORT",
            help="Where /healthz /readyz /status /metrics are served; port 0 takes a free one.",
        ),
    ] = "127.0.0.1:9109",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_VLLM_API_KEY",
            help="vLLM's API key. Better in the environment: others see a command's flags.",
            show_default=False,
        ),
    ] = None,
    poll_interval: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_POLL_INTERVAL",
            help="Seconds between two looks when nothing wakes the sidecar; caps every back-off.",
        ),
    ] = 5.0,
    linger: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_LINGER",
            help="Seconds for which a version outside the window stays loaded.",
        ),
    ] = 2.0,
    grace: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_GRACE",
            help="Seconds for which local files stay after vLLM shows no request on them.",
        ),
    ] = 10.0,
    heartbeat: Annotated[
        float, typer.Option(envvar="POLICYLINE_HEARTBEAT", help="Seconds between two heartbeats.")
    ] = 2.0,
    ttl: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_TTL",
            help="Seconds after which a replica without a heartbeat is declared lost.",
        ),
    ] = 15.0,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            envvar="POLICYLINE_REPLACE",
            help="Take the place of a sidecar that serves the same replica and lives.",
        ),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            envvar="POLICYLINE_TAKE_OVER_ADAPTERS",
            help="Remove adapters that another ledger or hand loaded under names of this line.",
        ),
    ] = False,
) -> None:
    """Run beside one vLLM server: fetch, verify, load, probe, acknowledge and evict versions.

    Ends with 0 on SIGTERM or Ctrl-C, after it has left the fleet in the ledger.
    """
    # imported late: an HTTP server and client are no business of the other commands
    from policyline.watcher import SidecarSettings  # noqa: PLC0415 - see above

    _share_one_arena()
    name = replica or _default_replica(vllm)
    host, port = listen_address(listen)
    settings = SidecarSettings(
        replica=name,
        cache=cache or default_cache(name),
        cache_limit_bytes=cache_limit,
        line=line,
        listen_host=host,
        listen_port=port,
        poll_interval_s=poll_interval,
        linger_s=linger,
        grace_s=grace,
        heartbeat_s=heartbeat,
        ttl_s=ttl,
        advertise=None if advertise is None else advertise.rstrip("/"),
        replace=replace,
        take_over=take_over,
    )
    asyncio.run(_run(settings, vllm=vllm, storage=storage, ledger=ledger, api_key=api_key))


async def _run(
    settings: SidecarSettings, *, vllm: str, storage: str, ledger: str, api_key: str | None
) -> None:
    """Wire the parts and serve until a signal."""
    from policyline.watcher import Sidecar  # noqa: PLC0415 - as above
    from policyline.watcher.vllm.client import EngineClient  # noqa: PLC0415 - as above

    try:
        engine = EngineClient(vllm, api_key=api_key)
    except ValueError as error:
        raise typer.BadParameter(f"--vllm: {error}") from error
    async with engine:
        bytes_at = open_storage(storage)
        bytes_at.names()  # a storage that is not there is told now, not when a version comes
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
