"""`policyline router`."""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import Annotated

import typer

from policyline.cli.command import Options
from policyline.cli.options import LedgerOption, default_cache
from policyline.ledger import Ledger
from policyline.ledger.settings import RunSettings
from policyline.router.settings import RouterSettings
from policyline.setting import parse_address
from policyline.storage import open_storage
from policyline.trainers.settings import LoadReturns, TrainerSettings

EPILOG = """
Examples:

    policyline router --ledger ledger.db --listen 127.0.0.1:8080

    POLICYLINE_UPSTREAM_KEY=... policyline router --ledger postgresql://me@db/policies \\
        --listen 0.0.0.0:8080 --min-ready 2 --spool /var/lib/policyline/spool

    policyline router --ledger ledger.db --storage /mnt/policies   # TRL's URL: .../t/my-run

Then point any OpenAI client at http://127.0.0.1:8080/v1 and name a version, or trl-policy for
current.
"""


def router(
    ledger: LedgerOption,
    options: Options[RouterSettings],
    trainer: Options[TrainerSettings],
    rules: Annotated[Options[RunSettings], {"min_ready": "--run-min-ready"}],
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_STORAGE",
            help="Where versions are stored. Given: an unmodified TRL may train with the URL "
            "http://HOST:PORT/t/RUN, and what it loads is published there.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_ROUTER_API_KEY",
            help="Bearer that clients must send. Better in the environment: others see a "
            "command's flags.",
        ),
    ] = None,
    upstream_key: Annotated[
        str | None,
        typer.Option(
            envvar="POLICYLINE_UPSTREAM_KEY",
            help="Bearer that every replica is sent: vLLM's API key, or the token of an exposed "
            "port. Better in the environment.",
        ),
    ] = None,
) -> None:
    """Give a fleet one address: each request goes to a replica that acked the version it names.

    With --storage also the address of an unmodified TRL; --run-min-ready, --max-staleness,
    --ready-grace and --candidate-timeout are rules of the runs that it opens.

    Ends with 0 on SIGTERM or Ctrl-C, after requests in flight have ended and rollouts are recorded.
    """
    _, port = parse_address("--listen", options.given["listen"])
    settings = options.build(spool=options.given["spool"] or default_cache(f"spool-{port}"))
    trainers = trainer.build(line=settings.line, run=rules.build())
    if storage and trainers.forward_pause and trainers.returns is LoadReturns.READY:
        raise typer.BadParameter("--forward-pause: a paused fleet gets nothing ready")
    asyncio.run(_run(settings, ledger, (api_key, upstream_key), storage, trainers))


async def _run(
    settings: RouterSettings,
    ledger: str,
    keys: tuple[str | None, str | None],
    storage: str | None,
    trainers: TrainerSettings,
) -> None:
    """Wire the parts and serve until a signal; the keys are the router's own and the replicas'."""
    # imported late: an HTTP server and client are no business of the other commands
    from policyline.router import create_app  # noqa: PLC0415 - see above
    from policyline.trainers.adapter import TrainerAdapter  # noqa: PLC0415 - see above

    with Ledger(ledger) as opened:
        adapter = None
        if storage is not None:
            bytes_at = open_storage(storage)
            bytes_at.check_writable()
            adapter = TrainerAdapter(opened, bytes_at, trainers)
        own, upstream = keys
        app = create_app(settings, opened, api_key=own, upstream_key=upstream, trainer=adapter)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, app.stop)
        async with app:
            await app.listen(*settings.address)
            _collect_seldom()
            await app.run()


def _collect_seldom() -> None:
    """Collect garbage seldom: a tenth less processor time for each request, measured.

    What is loaded by now stays, and requests leave hardly any cycles, so that a collection after
    every 700 objects finds nothing.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
