"""Verbs that show the present: runs, phases."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import Any

from policyline.cli.ledger.arguments import RunOption, known_line
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import clock, print_json, print_table
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.read.rollout_queries import PhaseRow


def runs(ledger: LedgerOption, as_json: JsonOption = False) -> None:
    """List the runs, oldest first."""
    with Ledger(ledger) as opened:
        rows = opened.runs()
    if as_json:
        print_json(rows)
        return
    print_table(
        ("run", "line", "state", "epoch", "held by", "staleness", "opened", "parent"),
        [
            (
                r.run,
                r.line,
                r.state,
                r.epoch,
                r.holder,
                r.max_staleness,
                clock(r.opened_at),
                r.parent_run,
            )
            for r in rows
        ],
    )


def phases(
    ledger: LedgerOption,
    run: RunOption = None,
    line: LineOption = DEFAULT_LINE,
    as_json: JsonOption = False,
) -> None:
    """Show where the time goes from the trainer's call to the ack: p50 and p95 of each phase."""
    with Ledger(ledger) as opened:
        if run is not None:
            opened.run(run)
        else:
            known_line(opened, line)
        rows = opened.phases(run=run, line=None if run else line)
    summary = summarise(rows)
    if as_json:
        print_json(summary)
        return
    print_table(
        ("phase", "where", "n", "p50 ms", "p95 ms"),
        [
            (s["phase"], s["where"], s["n"], f"{s['p50_s'] * 1e3:.1f}", f"{s['p95_s'] * 1e3:.1f}")
            for s in summary
        ],
    )
    if summary:
        largest = max(summary, key=lambda s: float(s["p50_s"]))
        sys.stdout.write(f"largest: {largest['phase']} at the {largest['where']}\n")


def summarise(rows: list[PhaseRow]) -> list[dict[str, Any]]:
    """p50 and p95 in seconds of each phase, in the order in which a version goes through them."""
    grouped: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        where = "publisher" if row.source == "publisher" else "watcher"
        grouped[where, row.phase].append(row.duration_s)
    return [
        {
            "phase": phase,
            "where": where,
            "n": len(values),
            "p50_s": statistics.median(values),
            "p95_s": percentile(values, 95),
        }
        for (where, phase), values in sorted(grouped.items(), key=lambda item: _place(item[0][1]))
    ]


PHASES = (
    *("train_step", "gather", "save", "check", "digest", "commit", "append"),
    *("notice", "fetch", "verify", "load", "probe", "ack"),
    *("queue", "prefill", "decode"),
)


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * int(percent) // 100) - 1)]
