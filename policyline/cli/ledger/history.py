"""Verbs that show the past: audit, as-of, events, verify."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from policyline.cli.command import add_command
from policyline.cli.ledger.arguments import (
    FromOption,
    ToOption,
    check_order,
    known_line,
    version_json,
    version_number,
)
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import (
    as_fields,
    clock,
    megabytes,
    print_fields,
    print_json,
    print_json_line,
    print_line,
    print_table,
)
from policyline.errors import ExitCode
from policyline.ledger import Ledger
from policyline.ledger.errors import NotFound
from policyline.ledger.events import Event
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.ledger.read.as_of import as_of, seq_at
from policyline.ledger.read.audit import VersionAudit, audit, find_rollout
from policyline.ledger.read.replay import describe
from policyline.ledger.read.verify import verify
from policyline.ledger.rollouts import RolloutRow
from policyline.storage import open_storage
from policyline.storage_check import Hashed, check_storage


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    add_command(app, audit_version, "policyline ledger audit 7 --ledger run.db", name="audit")
    add_command(app, events, "policyline ledger events --from 100 --json")
    add_command(
        app,
        show_as_of,
        "policyline ledger as-of 2026-01-31T12:00:00Z --ledger run.db",
        name="as-of",
    )
    add_command(app, verify_ledger, "policyline ledger verify --ledger run.db", name="verify")


def audit_version(
    what: Annotated[
        str,
        typer.Argument(
            help="A version, a digest (8 or more hex digits), or a request's id: the router's "
            "header x-request-id, or the id in the answer's body."
        ),
    ],
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    as_json: JsonOption = False,
) -> None:
    """Show a version's full history: digest, publisher, and who served it from when to when.

    A digest may belong to several versions; a request's id leads to the version that answered it.
    """
    with Ledger(ledger) as opened:
        stories, rollout = _stories(opened, line, what)
    if as_json:
        found = [{**_audit_json(s), "events": [event_json(e) for e in s.events]} for s in stories]
        print_json({"rollout": rollout, "versions": found})
        return
    if rollout is not None:
        print_fields({name: getattr(rollout, name) for name in _SHOWN_OF_A_ROLLOUT})
        sys.stdout.write("\n")
    for story in stories:
        _print_story(story)


_SHOWN_OF_A_ROLLOUT = ("request", "asked_name", "version", "replica", "status", "started_at")
_HEX = re.compile("[0-9a-fA-F]{8,64}")


def _stories(ledger: Ledger, line: str, what: str) -> tuple[list[VersionAudit], RolloutRow | None]:
    rollout = find_rollout(ledger, what)
    if rollout is not None:
        return [audit(ledger, rollout.line, rollout.version)], rollout
    if _HEX.fullmatch(what) and not what.isdigit():
        rows = ledger.find_version(what.lower())
        if not rows:
            raise NotFound(f"no version has a digest that starts with {what}")
        return [audit(ledger, row.line, row.version) for row in rows], None
    try:
        number = version_number(line, what)
    except typer.BadParameter as error:
        raise NotFound(
            f"{what!r:.100} is no version of line {line!r}, no digest and no recorded request",
            hint=f"write 7 or {line}-v7, 8 or more digits of a digest, or a request's id",
        ) from error
    return [audit(ledger, line, number)], None


def _print_story(story: VersionAudit) -> None:
    row = story.row
    rollouts = ", ".join(f"{count} by {replica}" for replica, count in story.rollouts.items())
    print_fields(
        {
            "version": story.name,
            "state": row.state + (f" ({row.reason})" if row.reason else ""),
            "digest": row.digest,
            "size": None if row.size_bytes is None else f"{megabytes(row.size_bytes)} MB",
            "run": f"{row.run}, epoch {row.epoch}",
            "published by": row.publisher,
            "published": clock(row.published_at),
            "rollouts": rollouts or None,
        }
    )
    print_table(
        ("replica", "incarnation", "acked", "until", "ended by"),
        [
            (s.replica, s.incarnation, clock(s.acked_at), clock(s.ended_at), s.ended_by)
            for s in story.servings
        ],
    )
    for event in story.events:
        print_line(f"{event.seq:>8}  {clock(event.recorded_at)}  {describe(event)}")


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


def event_json(event: Event) -> dict[str, Any]:
    """Every column, and the payload parsed."""
    return {**{n: getattr(event, n) for n in Event.__slots__}, "payload": event.data}


def _audit_json(story: VersionAudit) -> dict[str, Any]:
    return {
        "name": story.name,
        "version": version_json(story.row),
        "servings": story.servings,
        "phases": story.phases,
        "rollouts": story.rollouts,
    }
