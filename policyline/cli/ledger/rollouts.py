"""`policyline ledger rollouts`: which request was answered from which version."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from policyline.cli.ledger.arguments import MOST, known_line, version_number
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import clock, print_json_line, print_table
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.read.as_of import parse_time
from policyline.ledger.rollouts import MixedEpisode, RolloutFilter, RolloutRow

SHOWN_ON_A_SCREEN = 50


class Format(StrEnum):
    """How rollouts are printed."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


def rollouts(
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    version: Annotated[str | None, typer.Option(help="Only of this version.")] = None,
    replica: Annotated[str | None, typer.Option(help="Only from this replica.")] = None,
    run: Annotated[str | None, typer.Option(help="Only of this run.")] = None,
    since: Annotated[str | None, typer.Option(help="Started at or after (UTC).")] = None,
    until: Annotated[str | None, typer.Option(help="Started before (UTC).")] = None,
    min_staleness: Annotated[
        int | None,
        typer.Option(
            min=-MOST,
            max=MOST,
            help="At least so many versions behind.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="At most so many."),
    ] = None,
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed",
            help="Only episodes and groups that several versions answered.",
        ),
    ] = False,
    form: Annotated[
        Format, typer.Option("--format", envvar="POLICYLINE_FORMAT", help="Table, CSV or JSONL.")
    ] = Format.TABLE,
    as_json: JsonOption = False,
) -> None:
    """List rollouts, filtered; as a table the first 50, as CSV or JSONL all of them.

    With --json one object a line, as with --format jsonl.
    """
    now = datetime.now(UTC)
    if as_json:
        form = Format.JSONL
    if form is Format.TABLE and limit is None:
        limit = SHOWN_ON_A_SCREEN
    wanted = RolloutFilter(
        line=line,
        run=run,
        version=None if version is None else version_number(line, version),
        replica=replica,
        since=None if since is None else parse_time(since, now),
        until=None if until is None else parse_time(until, now),
        min_staleness=min_staleness,
        limit=limit,
    )
    with Ledger(ledger) as opened:
        known_line(opened, line)
        if run is not None:
            opened.run(run)
        if mixed:
            _print_mixed(opened.mixed_episodes(line, run=run), form)
            return
        found = opened.rollouts(wanted)
        if form is Format.JSONL:
            for row in found:
                print_json_line(row)
        elif form is Format.CSV:
            _print_csv(found)
        else:
            _print_table(list(found))


def _print_mixed(found: list[MixedEpisode], form: Format) -> None:
    if form is Format.CSV:
        raise typer.BadParameter(
            "an episode has several versions and replicas, which is no row of CSV; write jsonl",
            param_hint="--format",
        )
    if form is Format.JSONL:
        for episode in found:
            print_json_line(episode)
        return
    print_table(
        ("episode", "run", "requests by version", "replicas", "first", "last"),
        [
            (
                e.episode,
                e.run,
                ", ".join(f"v{version}: {count}" for version, count in sorted(e.requests.items())),
                ", ".join(e.replicas),
                clock(e.first_at),
                clock(e.last_at),
            )
            for e in found
        ],
    )


def _print_csv(found: Iterator[RolloutRow]) -> None:
    writer = csv.DictWriter(sys.stdout, [f.name for f in fields(RolloutRow)])
    writer.writeheader()
    for row in found:
        writer.writerow(asdict(row))


def _print_table(found: list[RolloutRow]) -> None:
    print_table(
        ("request", "version", "stale", "replica", "status", "started", "prefill ms", "tokens"),
        [
            (
                r.request,
                r.version,
                r.staleness,
                r.replica,
                r.status,
                clock(r.started_at),
                f"{r.prefill_s * 1e3:.1f}",
                r.completion_tokens,
            )
            for r in found
        ],
    )
