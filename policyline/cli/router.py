"""`policyline router`."""

from __future__ import annotations

import asyncio
import gc
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from policyline.cli.options import (
    CandidateTimeoutOption,
    LedgerOption,
    LineOption,
    MaxStalenessOption,
    MinReadyOption,
    ReadyGraceOption,
    default_cache,
    listen_address,
    min_ready_number,
)
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.settings import RunSettings
from policyline.storage import open_storage

if TYPE_CHECKING:
    from policyline.router import RouterSettings
    from policyline.trainers.adapter import TrainerSettings


_RULES = RunSettings()


class LoadReturns(StrEnum):
    """When a trainer's load returns."""

    READY = "ready"
    COMMITTED = "committed"


EPILOG = """
Examples:

    policyline router --ledger ledger.db --listen 127.0.0.1:8080

    POLICYLINE_UPSTREAM_KEY=... policyline router --ledger postgresql://me@db/policies \\
        --listen 0.0.0.0:8080 --min-ready 2 --spool /var/lib/policyline/spool

    policyline router --ledger ledger.db --storage /mnt/policies   # TRL's URL: .../t/my-run

Then point any OpenAI client at http://127.0.0.1:8080/v1 and name a version, or trl-policy for
current.
"""


def add_to(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(epilog=EPILOG)(router)


def router(
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    listen: Annotated[
        str,
        typer.Option(
            envvar="POLICYLINE_ROUTER_LISTEN",
            metavar="HOST:PORT",
            help="Where clients come; port 0 takes a free one and logs it.",
        ),
    ] = "127.0.0.1:8080",
    spool: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_SPOOL",
            help="Directory for rollouts that the ledger does not have yet, on a local disk; one "
            "router uses it. Default: ~/.cache/policyline/spool-PORT.",
            show_default=False,
        ),
    ] = None,
    alias: Annotated[
        str,
        typer.Option(
            envvar="POLICYLINE_ALIAS",
            help="Model name that means current, kept for a session (header x-policyline-session, "
            "or the field user).",
        ),
    ] = DEFAULT_LINE,
    pin_ttl: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_PIN_TTL",
            min=0.001,
            help="Seconds without a request after which a session's version is forgotten.",
        ),
    ] = 3600.0,
    ready_wait: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_READY_WAIT",
            min=0.0,
            help="Seconds for which a request waits for a version that is not acked yet, or for a "
            "slot.",
        ),
    ] = 30.0,
    min_ready: Annotated[
        int,
        typer.Option(
            envvar="POLICYLINE_ROUTER_MIN_READY",
            min=1,
            help="Replicas that must serve current for /health to be 200.",
        ),
    ] = 1,
    spill: Annotated[
        int,
        typer.Option(
            envvar="POLICYLINE_SPILL",
            min=0,
            help="Requests by which the holder of a prefix may be ahead of the least loaded.",
        ),
    ] = 16,
    max_in_flight: Annotated[
        int,
        typer.Option(
            envvar="POLICYLINE_MAX_IN_FLIGHT",
            min=1,
            help="Requests at once; more are answered 503.",
        ),
    ] = 4096,
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_STORAGE",
            help="Where versions are kept. Given: an unmodified TRL may train with the URL "
            "http://HOST:PORT/t/RUN, and what it loads is published there.",
            show_default=False,
        ),
    ] = None,
    load_returns: Annotated[
        LoadReturns,
        typer.Option(
            envvar="POLICYLINE_LOAD_RETURNS",
            help="A trainer's load returns when its version is current, or when it is published.",
        ),
    ] = LoadReturns.READY,
    load_wait: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_LOAD_WAIT",
            min=0.0,
            help="The longest wait of a load for ready, seconds; then requests wait.",
        ),
    ] = 120.0,
    follow_after: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_FOLLOW_AFTER",
            min=0.0,
            help="A load that opens a run ends the line's run before it, and is refused while that "
            "one is held and has published within so many seconds.",
        ),
    ] = 60.0,
    forward_pause: Annotated[
        bool,
        typer.Option(
            "--forward-pause",
            envvar="POLICYLINE_FORWARD_PAUSE",
            help="Pause the whole fleet while a trainer does; needs --load-returns committed.",
        ),
    ] = False,
    max_staleness: MaxStalenessOption = _RULES.max_staleness,
    run_min_ready: MinReadyOption = "1",
    ready_grace: ReadyGraceOption = _RULES.ready_grace_s,
    candidate_timeout: CandidateTimeoutOption = _RULES.candidate_timeout_s,
    read_timeout: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_READ_TIMEOUT",
            min=0.001,
            help="Seconds without a byte from a replica; without streaming, of a whole generation.",
        ),
    ] = 600.0,
    drain_timeout: Annotated[
        float,
        typer.Option(
            envvar="POLICYLINE_DRAIN_TIMEOUT",
            min=0.0,
            help="Seconds for which requests in flight may go on after SIGTERM.",
        ),
    ] = 60.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_ROUTER_API_KEY",
            help="Bearer that clients must send. Better in the environment: others see a "
            "command's flags.",
            show_default=False,
        ),
    ] = None,
    upstream_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_UPSTREAM_KEY",
            help="Bearer that every replica is sent: vLLM's API key, or the token of an exposed "
            "port. Better in the environment.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Give a fleet one address: each request goes to a replica that acked the version it names.

    With --storage also the address of an unmodified TRL; --max-staleness to --candidate-timeout are
    rules of the runs that it opens.

    Ends with 0 on SIGTERM or Ctrl-C, after requests in flight have ended and rollouts are recorded.
    """
    # imported late: an HTTP server and client are no business of the other commands
    from policyline.router import RouterSettings  # noqa: PLC0415 - see above
    from policyline.trainers.adapter import TrainerSettings  # noqa: PLC0415 - see above

    host, port = listen_address(listen)
    settings = RouterSettings(
        line=line,
        spool=spool or default_cache(f"spool-{port}"),
        alias=alias,
        pin_ttl_s=pin_ttl,
        ready_wait_s=ready_wait,
        min_ready=min_ready,
        spill=spill,
        max_in_flight=max_in_flight,
        read_timeout_s=read_timeout,
        drain_timeout_s=drain_timeout,
    )
    trainers = None
    if storage is not None:
        if forward_pause and load_returns is LoadReturns.READY:
            raise typer.BadParameter("--forward-pause: a paused fleet gets nothing ready")
        rules = RunSettings(
            max_staleness=max_staleness,
            min_ready=min_ready_number(run_min_ready),
            ready_grace_s=ready_grace,
            candidate_timeout_s=candidate_timeout,
        )
        trainers = TrainerSettings(
            line=line,
            run=rules,
            returns="ready" if load_returns is LoadReturns.READY else "committed",
            ready_wait_s=load_wait,
            follow_after_s=follow_after,
            forward_pause=forward_pause,
        )
    keys = _Keys(api_key, upstream_key)
    asyncio.run(_run(settings, (host, port), ledger, keys, storage, trainers))


@dataclass(frozen=True, slots=True)
class _Keys:
    """Secrets."""

    own: str | None
    upstream: str | None


async def _run(
    settings: RouterSettings,
    address: tuple[str, int],
    ledger: str,
    keys: _Keys,
    storage: str | None,
    trainers: TrainerSettings | None,
) -> None:
    """Wire the parts and serve until a signal."""
    from policyline.router import create_app  # noqa: PLC0415 - as above
    from policyline.trainers.adapter import TrainerAdapter  # noqa: PLC0415 - as above

    with Ledger(ledger) as opened:
        facade = None
        if storage is not None:
            bytes_at = open_storage(storage)
            bytes_at.check_writable()
            facade = TrainerAdapter(opened, bytes_at, trainers)
        app = create_app(
            settings, opened, api_key=keys.own, upstream_key=keys.upstream, trainer=facade
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, app.stop)
        async with app:
            await app.listen(*address)
            _collect_seldom()
            await app.run()


def _collect_seldom() -> None:
    """Collect garbage seldom: a tenth less processor time for each request, measured.

    What is loaded by now stays, and requests leave hardly any cycles, so that a collection after
    every 700 objects finds nothing.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
