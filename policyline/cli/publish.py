"""`policyline publish`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from policyline.cli.command import Options
from policyline.cli.options import (
    JsonOption,
    LedgerOption,
    LineOption,
    StorageOption,
    TakeOverOption,
    create_missing,
)
from policyline.cli.output import print_fields, print_json
from policyline.ledger import Ledger, RunSettings
from policyline.ledger.errors import Refused
from policyline.ledger.names import DEFAULT_LINE, check_label
from policyline.storage import open_storage

if TYPE_CHECKING:
    from policyline.publisher import Published


def publish(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="What PEFT's save_pretrained wrote. It is only read.",
        ),
    ],
    run: Annotated[
        str,
        typer.Option(envvar="POLICYLINE_RUN", help="Run; it is opened if there is none yet."),
    ],
    ledger: LedgerOption,
    storage: StorageOption,
    rules: Options[RunSettings],
    line: LineOption = DEFAULT_LINE,
    version: Annotated[
        int | None,
        typer.Option(
            envvar="POLICYLINE_VERSION",
            min=1,
            help="Number of the version, for a retry that must not publish twice. Default: next.",
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            envvar="POLICYLINE_METADATA",
            metavar="KEY=VALUE",
            help="Recorded with the version; a VALUE that is JSON is recorded as JSON. Repeatable.",
        ),
    ] = None,
    base_model: Annotated[
        Path | None,
        typer.Option(
            envvar="POLICYLINE_BASE_MODEL",
            exists=True,
            file_okay=False,
            help="Directory of the base model, to check layers and sizes against.",
        ),
    ] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option(
            envvar="POLICYLINE_MAX_LORA_RANK",
            min=1,
            help="The servers' --max-lora-rank: refuse now what they would refuse.",
        ),
    ] = None,
    parent_run: Annotated[
        str | None,
        typer.Option(envvar="POLICYLINE_PARENT_RUN", help="Run that a new run goes on from."),
    ] = None,
    take_over: TakeOverOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a saved adapter and publish it as a version of a run.

    Returns when the version is durable and in the ledger; servers take it up by themselves. The
    options of a run (staleness, readiness, parent) count only when this opens it. A SQLite ledger
    and a storage directory that are not there yet are created.
    """
    # Here, so that other commands do not wait for numpy.
    from policyline.publisher import Publisher  # noqa: PLC0415 - see above
    from policyline.publisher.check.base_model import read_layer_sizes  # noqa: PLC0415 - see above
    from policyline.publisher.check.source import inspect  # noqa: PLC0415 - see above
    from policyline.publisher.check.staging import check_numbers  # noqa: PLC0415 - see above

    settings = rules.build()
    known = read_metadata(metadata or [])
    # before the run is opened, since that closes the line's former run
    base = None if base_model is None else read_layer_sizes(base_model)
    source = inspect(directory, base=base, max_lora_rank=max_lora_rank)
    check_label("run", run)
    create_missing(ledger, storage)
    with Ledger(ledger) as opened:
        if opens_run(opened, run=run, line=line, parent_run=parent_run):
            check_numbers(source, source.directory)
    with (
        Ledger(ledger) as opened,
        Publisher(
            opened,
            open_storage(storage),
            run=run,
            line=line,
            settings=settings,
            parent_run=parent_run,
            take_over=take_over,
            base_model=base_model,
            max_lora_rank=max_lora_rank,
        ) as publisher,
    ):
        _print(publisher.publish(directory, metadata=known, version=version), as_json=as_json)


def opens_run(ledger: Ledger, *, run: str, line: str, parent_run: str | None) -> bool:
    """Whether publishing to `run` opens it.

    Raises:
        Refused: another run is open, which a mistyped name would close; who names a parent has
            not mistyped.
    """
    if any(row.run == run for row in ledger.runs()):
        return False
    present = ledger.view(line).run
    if present is not None and parent_run is None:
        raise Refused(
            f"run {run!r} does not exist, and run {present.run!r} is open on line {line!r}",
            hint=f"publish to {present.run}, name a --parent-run, or first run: "
            f"policyline ledger open-run {run}",
        )
    return True


def read_metadata(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `KEY=VALUE` pairs: a value that is JSON is parsed, any other is text.

    Raises:
        typer.BadParameter: no `=`, no key, or a key given twice.
    """
    read: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--metadata {pair!r} is not KEY=VALUE")
        if key in read:
            raise typer.BadParameter(f"--metadata gives {key!r} twice")
        try:
            read[key] = json.loads(value)
        except ValueError:
            read[key] = value
    return read


def _print(published: Published, *, as_json: bool) -> None:
    if as_json:
        print_json(published)
        return
    phases = " ".join(f"{name} {1000 * s:.1f} ms" for name, s in published.phases.items())
    print_fields(
        {
            "name": published.name,
            "digest": published.digest,
            "size": f"{published.size_bytes} bytes",
            "path": published.path,
            "phases": phases or "published before with these bytes",
        }
    )
