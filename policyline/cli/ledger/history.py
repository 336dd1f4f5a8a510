"""Verbs that show the past: audit, events, replay, verify."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ledger import Ledger
from ledger.audit import VersionAudit, audit
from ledger.events import Event
from ledger.names import DEFAULT_LINE
from ledger.replay import State, describe, replay
from ledger.verify import verify
from policyline.cli.failure import CHECK_FAILED
from policyline.cli.ledger.arguments import VersionArgument, version_number
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import (
    as_fields,
    clock,
    megabytes,
    print_fields,
    print_json,
    print_json_line,
    print_table,
)

FromOption = Annotated[
    int, typer.Option("--from", envvar="POLICYLINE_FROM", min=1, help="First event (seq).")
]
ToOption = Annotated[
    int | None, typer.Option("--to", envvar="POLICYLINE_TO", min=1, help="Last event (seq).")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("audit", epilog="Example: policyline ledger audit 7 --ledger run.db")(audit_version)
    app.command(epilog="Example: policyline ledger events --from 100 --json")(events)
    app.command("replay", epilog="Example: policyline ledger replay grpo-7 --to 250")(replay_run)
    app.command("verify", epilog="Example: policyline ledger verify --ledger run.db")(verify_ledger)


def audit_version(
    version: VersionArgument,
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    as_json: JsonOption = False,
) -> None:
    """Tell a version's full story: digest, publisher, and who served it from when to when."""
    with Ledger(ledger) as opened:
        story = audit(opened, line, version_number(line, version))
    if as_json:
        print_json({**_audit_json(story), "events": [_event_json(e) for e in story.events]})
        return
    row = story.row
    print_fields(
        {
            "version": story.name,
            "state": row.state + (f" ({row.reason})" if row.reason else ""),
            "digest": row.digest,
            "size": None if row.size_bytes is None else f"{megabytes(row.size_bytes)} MB",
            "run": f"{row.run}, epoch {row.epoch}",
            "published by": row.publisher,
            "published": clock(row.published_at),
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
        sys.stdout.write(f"{event.seq:>8}  {clock(event.recorded_at)}  {describe(event)}\n")


def events(
    ledger: LedgerOption,
    first: FromOption = 1,
    last: ToOption = None,
    run: Annotated[str | None, typer.Option(envvar="POLICYLINE_RUN", help="Only this run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the events in order; with --json one object a line."""
    with Ledger(ledger) as opened:
        if run is not None:
            opened.run(run)
        for event in opened.events(after=first - 1, run=run):
            if last is not None and event.seq > last:
                break
            if as_json:
                print_json_line(_event_json(event))
            else:
                sys.stdout.write(
                    f"{event.seq:>8}  {clock(event.recorded_at)}  {event.actor}  "
                    f"{describe(event)}\n"
                )


def replay_run(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    ledger: LedgerOption,
    first: FromOption = 1,
    last: ToOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a run's history as a timeline, with the fleet's state after each event."""
    with Ledger(ledger) as opened:
        for event, replayer in replay(opened, run, first=first, last=last):
            state = replayer.state()
            if as_json:
                print_json_line({"event": _event_json(event), "state": _state_json(state)})
            else:
                sys.stdout.write(
                    f"{event.seq:>8}  {clock(event.recorded_at)}  {describe(event)}\n"
                    f"{'':>8}  {_state_line(state)}\n"
                )


def verify_ledger(ledger: LedgerOption, as_json: JsonOption = False) -> None:
    """Walk the hash chain, fold every event and compare with the tables. Exit 1 on a problem."""
    with Ledger(ledger) as opened:
        report = verify(opened)
    if as_json:
        print_json({"ok": report.ok, **as_fields(report)})
    else:
        for problem in report.problems:
            sys.stdout.write(f"problem: {problem.what}\n")
        verdict = "adds up" if report.ok else f"does not add up: {len(report.problems)} problems"
        sys.stdout.write(f"{report.events} events, head {report.head_hash[:16]}: {verdict}\n")
    if not report.ok:
        raise typer.Exit(CHECK_FAILED)


def _event_json(event: Event) -> dict[str, Any]:
    return {**{n: getattr(event, n) for n in Event.__slots__}, "payload": event.data}


def _audit_json(story: VersionAudit) -> dict[str, Any]:
    return {
        "name": story.name,
        "version": story.row,
        "servings": story.servings,
        "phases": story.phases,
    }


def _state_json(state: State) -> dict[str, Any]:
    return {
        "seq": state.seq,
        "current": state.current,
        "candidate": state.candidate,
        "served": state.served(),
    }


def _state_line(state: State) -> str:
    served = "  ".join(
        f"{replica}: {' '.join(f'v{v}' for v in versions) or 'nothing'}"
        for replica, versions in state.served().items()
    )
    current = "-" if state.current is None else f"v{state.current}"
    candidate = "-" if state.candidate is None else f"v{state.candidate}"
    return f"current {current}, candidate {candidate}; serving {served or 'no replica'}"
