"""`policyline ledger status`: the fleet now, or live with --watch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from policyline.cli.ledger.arguments import known_line
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import console, fields_text, make_table, print_json, print_json_line
from policyline.ledger import Ledger
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.ledger.readiness import is_acked
from policyline.watcher.core.liveness import Heartbeats, note_heartbeats, silent

REFRESH_S = 5.0
"""How often --watch reads without a signal: signals only shorten a wait."""
SILENT_S = 2 * REFRESH_S
"""--watch marks a replica whose heartbeat has not changed for so long. It declares nothing: a fleet
of one has no other sidecar that would, and its acks stay in the ledger."""


def status(
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            envvar="POLICYLINE_WATCH",
            help="Show it live until Ctrl-C; with --json one object a change.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the fleet: what is current, what each replica serves, what is on its way."""
    with Ledger(ledger) as opened:
        known_line(opened, line)
        if watch:
            _watch(opened, line, as_json=as_json)
            return
        view = opened.view(line)
        if as_json:
            print_json(_as_json(view))
        else:
            console().print(_picture(opened, view))


def _watch(ledger: Ledger, line: str, *, as_json: bool) -> None:
    try:
        if as_json or not sys.stdout.isatty():
            for view, silent_s in _views(ledger, line):
                if as_json:
                    print_json_line({**_as_json(view), "silent_s": silent_s})
                else:
                    console().print(_picture(ledger, view, silent_s))
                sys.stdout.flush()
            return
        with Live(console=console(), screen=True, auto_refresh=False) as live:
            for view, silent_s in _views(ledger, line):
                live.update(_picture(ledger, view, silent_s), refresh=True)
    except KeyboardInterrupt:
        return


def _views(ledger: Ledger, line: str) -> Iterator[tuple[LineSnapshot, dict[str, int]]]:
    """The line now, and again whenever its events have moved; for how long who is silent."""
    shown: tuple[int, dict[str, int]] = (-1, {})
    pulses = Heartbeats()
    for _ in ledger.follow(poll_s=REFRESH_S):
        view, now = ledger.view(line), time.monotonic()
        pulses = note_heartbeats(pulses, ledger.heartbeats(line), now, gap_s=4 * REFRESH_S)
        silent_s = {
            replica: int(now - pulse.since_s)
            for replica, pulse in silent(pulses, view, now, me=None, ttl_s=SILENT_S).items()
        }
        if (view.seq, silent_s) != shown:
            shown = (view.seq, silent_s)
            yield view, silent_s


def _picture(
    ledger: Ledger, view: LineSnapshot, silent_s: Mapping[str, int] | None = None
) -> RenderableType:
    run, line, silent_s = view.run, view.line.line, silent_s or {}
    about = fields_text(
        {
            "ledger": f"{ledger.shown_url} ({view.seq} events)",
            "line": line,
            "run": None
            if run is None
            else f"{run.run}, epoch {run.epoch}, held by {run.holder or 'nobody'}",
            "current": None if view.current is None else policy_name(line, view.current),
            "candidate": None if view.candidate is None else policy_name(line, view.candidate),
            "paused": "asked for" if view.line.paused else "no",
        }
    )
    names = [f"v{d.version} {d.role}" for d in view.desired]
    fleet = make_table(
        ("replica", "state", "incarnation", *names),
        [
            (
                name,
                replica.state
                if name not in silent_s
                else f"{replica.state}, silent for {silent_s[name]} s",
                replica.incarnation,
                *(_cell(view, name, d.version) for d in view.desired),
            )
            for name, replica in view.replicas.items()
        ],
    )
    return Group(Text(about), fleet)


def _cell(view: LineSnapshot, replica: str, version: int) -> str | None:
    row = view.residency.get((replica, version))
    if row is None:
        return None
    if row.state == "acked" and not is_acked(view.replicas[replica], row):
        return "void"
    return row.state if not row.reason else f"{row.state}: {row.reason:.40}"


def _as_json(view: LineSnapshot) -> dict[str, Any]:
    return {
        "ledger_id": view.ledger_id,
        "seq": view.seq,
        "line": view.line,
        "run": view.run,
        "current": view.current,
        "candidate": view.candidate,
        "desired": [
            {
                "version": d.version,
                "name": d.name,
                "digest": d.digest,
                "role": d.role,
                "acked_by": view.acked_by(d.version),
            }
            for d in view.desired
        ],
        "replicas": list(view.replicas.values()),
    }
