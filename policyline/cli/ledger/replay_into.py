"""`policyline ledger replay RUN --into URL`: serve a run's versions again on a live server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from policyline.cli.command import Options
from policyline.cli.options import default_cache
from policyline.cli.output import print_json_line, print_table, short
from policyline.errors import ExitCode
from policyline.ledger import Ledger
from policyline.replay_into.settings import ReplaySettings
from policyline.storage import open_storage

if TYPE_CHECKING:
    from policyline.replay_into.model import Replayed
    from policyline.replay_into.run import Replay
    from policyline.watcher.vllm.client import EngineClient


@dataclass(frozen=True, slots=True)
class IntoOptions:
    """What was asked for."""

    run: str
    ledger: str
    vllm: str
    storage: str | None
    versions: str | None
    cache: Path | None
    state: Path | None
    settings: Options[ReplaySettings]
    api_key: str | None
    as_json: bool


def replay_into(options: IntoOptions) -> None:
    """Replay; results on stdout, progress on stderr.

    Raises:
        typer.BadParameter: an option that cannot work.
        typer.Exit: 1 when a version is not what it was, 128 + signal when interrupted.
    """
    from policyline.replay_into.records import Range, parse_range  # noqa: PLC0415 - see below
    from policyline.watcher.vllm.client import EngineClient  # noqa: PLC0415 - an HTTP client, for this alone

    if options.storage is None:
        raise typer.BadParameter("--into needs --storage, where the versions' bytes are")
    wanted = Range() if options.versions is None else parse_range(options.versions)
    if wanted is None:
        raise typer.BadParameter(f"--versions {options.versions!r} is not A..B, A.., ..B or A")
    try:
        engine = EngineClient(options.vllm, api_key=options.api_key)
    except ValueError as error:
        raise typer.BadParameter(f"--into: {error}") from error
    settings = options.settings.build(run=options.run, versions=wanted)
    results, caught = asyncio.run(_replay(settings, options, options.storage, engine))
    if not options.as_json and results:
        _print(results)
    sys.stderr.write(_verdict(results, interrupted=caught is not None))
    if caught is not None:
        raise typer.Exit(128 + caught)
    if any(result.is_bad for result in results):
        raise typer.Exit(ExitCode.FAILED)


async def _replay(
    settings: ReplaySettings, options: IntoOptions, storage: str, engine: EngineClient
) -> tuple[list[Replayed], int | None]:
    """Wire the parts; also return the signal that ended it early, if one did."""
    from policyline.replay_into.run import Replay  # noqa: PLC0415 - as above
    from policyline.replay_into.state import StateFile  # noqa: PLC0415 - as above
    from policyline.watcher.cache import Cache  # noqa: PLC0415 - as above

    done: list[Replayed] = []

    def report(result: Replayed, number: int, total: int) -> None:
        done.append(result)
        sys.stderr.write(f"[{number}/{total}] {_as_text(result)}\n")
        if options.as_json:
            print_json_line(dataclasses.asdict(result) | {"ok": not result.is_bad})
            sys.stdout.flush()

    async with engine:
        with Ledger(options.ledger) as ledger:
            cache = Cache(options.cache or _default_cache(options.vllm), ledger.ledger_id)
            cache.open()
            try:
                replay = Replay(
                    settings,
                    ledger=ledger,
                    storage=open_storage(storage),
                    engine=engine,
                    cache=cache,
                    state=StateFile(options.state),
                    on_result=report,
                    on_message=_print_message,
                )
                caught = await _until_signalled(replay)
            finally:
                cache.close()
    return done, caught


async def _until_signalled(replay: Replay) -> int | None:
    """The first signal ends it after the step in hand, the second at once; both take it off."""
    caught: list[int] = []
    task = asyncio.ensure_future(replay.run())

    def end(number: int) -> None:
        caught.append(number)
        if len(caught) == 1:
            sys.stderr.write("stopping after the step in hand; once more stops at once\n")
            replay.stop()
        else:
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return caught[0] if caught else None


def _print_message(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _default_cache(vllm: str) -> Path:
    """A directory of its own: a sidecar's copies are not a replay's to delete."""
    parts = urlsplit(vllm)
    return default_cache(f"replay-{parts.hostname}-{parts.port or 80}")


def _as_text(result: Replayed) -> str:
    text = f"{result.name} {result.outcome.replace('_', ' ')}"
    if result.difference is not None:
        text += f", difference {result.difference:.3g} from {result.replica}"
    if result.reason:
        text += f": {result.reason}"
    return text


def _print(results: Sequence[Replayed]) -> None:
    def milliseconds(result: Replayed, phase: str) -> str | None:
        seconds = result.phases.get(phase)
        return None if seconds is None else f"{1000 * seconds:.1f}"

    print_table(
        ("version", "digest", "outcome", "difference", "of", "load ms", "probe ms", "reason"),
        [
            (
                r.name,
                short(r.digest),
                r.outcome.replace("_", " "),
                None if r.difference is None else f"{r.difference:.3g}",
                r.replica,
                milliseconds(r, "load"),
                milliseconds(r, "probe"),
                r.reason or None,
            )
            for r in results
        ],
    )


def _verdict(results: Sequence[Replayed], *, interrupted: bool) -> str:
    bad = [r.name for r in results if r.is_bad]
    agreed = sum(r.outcome == "agrees" for r in results)
    text = f"{len(results)} versions replayed, {agreed} agree with what was recorded"
    if bad:
        text += f"; wrong: {', '.join(bad)}"
    return f"{text}; interrupted\n" if interrupted else f"{text}\n"
