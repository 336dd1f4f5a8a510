"""Verbs that show the past: as-of, events, verify."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from policyline.cli.ledger.arguments import (
    FromOption,
    ToOption,
    check_order,
    event_json,
    known_line,
)
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import (
    as_fields,
    clock,
    print_fields,
    print_json,
    print_json_line,
    print_line,
    print_table,
)
from policyline.errors import ExitCode
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.ledger.read.as_of import as_of, seq_at
from policyline.ledger.read.replay import describe
from policyline.ledger.read.verify import verify
from policyline.storage import open_storage
from policyline.storage_check import Hashed, check_storage


def show_as_of(
    moment: Annotated[str, typer.Argument(metavar="TIME|SEQ", help="A time (UTC) or an event.")],
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    as_json: JsonOption = False,
) -> None:
    """Show who served which digest at a time, or right after an event."""
    with Ledger(ledger) as opened:
        number = moment.isascii() and moment.isdigit()
        seq = int(moment) if number else seq_at(opened, moment, datetime.now(UTC))
        there = as_of(opened, known_line(opened, line), seq)
    if as_json:
        print_json(there)
        return
    print_fields(
        {
            "as of": f"event {there.seq}, {clock(there.recorded_at)}",
            "run": there.run,
            "current": None if there.current is None else policy_name(line, there.current),
            "candidate": None if there.candidate is None else policy_name(line, there.candidate),
        }
    )
    print_table(
        ("replica", "version", "digest", "incarnation", "acked"),
        [(s.replica, s.name, s.digest, s.incarnation, clock(s.acked_at)) for s in there.served],
    )


def events(
    ledger: LedgerOption,
    first: FromOption = 1,
    last: ToOption = None,
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the events in order; with --json one object a line."""
    check_order(first, last)
    with Ledger(ledger) as opened:
        if run is not None:
            opened.run(run)
        for event in opened.events(after=first - 1, run=run):
            if last is not None and event.seq > last:
                break
            if as_json:
                print_json_line(event_json(event))
            else:
                when = clock(event.recorded_at)
                print_line(f"{event.seq:>8}  {when}  {event.actor}  {describe(event)}")


def verify_ledger(
    ledger: LedgerOption,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            envvar="POLICYLINE_STORAGE",
            help="Hash the stored versions again too, and compare their anchors.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Walk the hash chain, fold every event and compare with the tables. Exit 1 on a problem.

    With --storage also hash every stored version: versions without files, files without
    versions, changed bytes, and anchors that the chain does not hold.
    """
    with Ledger(ledger) as opened:
        report = verify(opened, on_progress=_show_progress)
        problems = list(report.problems)
        hashed = None if storage is None else Hashed()
        if storage is not None:
            problems += check_storage(opened, open_storage(storage), hashed=hashed)
    if as_json:
        print_json(
            {**as_fields(report), "ok": not problems, "problems": problems, "storage": hashed}
        )
    else:
        for problem in problems:
            print_line(f"problem: {problem.what}")
        for remedy in dict.fromkeys(problem.remedy for problem in problems):
            print_line(f"remedy: {remedy}")
        verdict = f"does not add up: {len(problems)} problems" if problems else "adds up"
        read = f"{report.events} events, head {report.head_hash[:16]}"
        if hashed is not None:
            read += (
                f"; in storage {hashed.versions} versions, {hashed.files} files, "
                f"{hashed.size_bytes} bytes hashed"
            )
        sys.stdout.write(f"{read}: {verdict}\n")
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def _show_progress(seq: int) -> None:
    if seq % 100_000 == 0:
        sys.stderr.write(f"{seq} events\n")
