"""What the demo found: versions and replicas from the ledger, latencies, checks; text and JSON."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from policyline.demo.checks import Check
from policyline.demo.client import Traffic
from policyline.demo.settings import DemoSettings
from policyline.ledger import Ledger
from policyline.ledger import events as kinds
from policyline.ledger.names import policy_name
from policyline.ledger.read.rollout_queries import PhaseRow
from policyline.ledger.rows import ResidencyRow

CellState = Literal["acked", "evicted", "skipped", "fetched", "failed", "rejected"]

PHASE_ORDER = (
    *(("publisher", phase) for phase in ("save", "digest", "check", "commit", "append")),
    *(("watcher", phase) for phase in ("notice", "fetch", "verify", "load", "probe", "ack")),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One version on one replica. Times are those of the ledger."""

    state: CellState
    acked_at: str | None = None
    evicted_at: str | None = None
    publish_to_ack_s: float | None = None


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One version's row of the table."""

    version: int
    name: str
    digest: str | None
    state: str
    role: str
    """current, candidate, window or out_of_window."""
    published_at: str | None
    replicas: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles in seconds."""

    n: int
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the demo ends with."""

    engine: str
    replicas: tuple[str, ...]
    max_staleness: int
    duration_s: float
    workdir: str | None
    """Where everything is; None when it was removed."""
    versions: tuple[VersionLine, ...]
    publish_to_ack: Latency | None
    phases: dict[str, Latency]
    """`publisher.save`, `watcher.load`, ... in the order in which they happen."""
    requests: dict[str, int]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {**asdict(self), "ok": self.ok}


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that at least the share `q` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def latency(values: Sequence[float]) -> Latency | None:
    """Quantiles of `values`; None for none."""
    if not values:
        return None
    return Latency(len(values), quantile(values, 0.5), quantile(values, 0.95))


def version_lines(ledger: Ledger, settings: DemoSettings) -> tuple[VersionLine, ...]:
    """The table, from the ledger's rows. Publish-to-ack starts when the number was reserved."""
    view = ledger.view(settings.line)
    roles = {desired.version: str(desired.role) for desired in view.desired}
    reserved = {
        event.version: event.recorded_at
        for event in ledger.events(line=settings.line, run=settings.run)
        if event.kind == kinds.VERSION_RESERVED
    }
    states = {(row.replica, row.version): row for row in ledger.residency(settings.line)}
    return tuple(
        VersionLine(
            version=row.version,
            name=policy_name(row.line, row.version),
            digest=row.digest,
            state=row.state,
            role=roles.get(row.version, "out_of_window"),
            published_at=row.published_at,
            replicas={
                replica: _cell(states.get((replica, row.version)), reserved[row.version])
                for replica in settings.replica_names
            },
        )
        for row in ledger.versions(run=settings.run)
    )


def _cell(row: ResidencyRow | None, reserved_at: str) -> Cell:
    if row is None:
        return Cell("skipped")
    return Cell(
        state=row.state,
        acked_at=row.acked_at,
        evicted_at=row.evicted_at,
        publish_to_ack_s=None if row.acked_at is None else _between(reserved_at, row.acked_at),
    )


def phase_latencies(rows: Sequence[PhaseRow]) -> dict[str, Latency]:
    """Quantiles for each phase, in the order in which phases happen."""
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        side = "publisher" if row.source == "publisher" else "watcher"
        durations[side, row.phase].append(row.duration_s)
    known = [key for key in PHASE_ORDER if key in durations]
    others = sorted(durations.keys() - set(known))
    found = ((key, latency(durations[key])) for key in (*known, *others))
    return {f"{side}.{phase}": quantiles for (side, phase), quantiles in found if quantiles}


def build(
    ledger: Ledger,
    settings: DemoSettings,
    traffic: Traffic,
    checks: Sequence[Check],
    duration_s: float,
) -> Report:
    """Put the report together from the ledger, the client's requests and the checks."""
    lines = version_lines(ledger, settings)
    acks = [
        cell.publish_to_ack_s
        for line in lines
        for cell in line.replicas.values()
        if cell.publish_to_ack_s is not None
    ]
    return Report(
        engine=settings.engine.value,
        replicas=settings.replica_names,
        max_staleness=settings.max_staleness,
        duration_s=duration_s,
        workdir=str(settings.workdir),
        versions=lines,
        publish_to_ack=latency(acks),
        phases=phase_latencies(ledger.phases(run=settings.run)),
        requests={
            "sent": traffic.sent,
            "failed": len(traffic.failures),
            "names": len(traffic.answered),
        },
        checks=tuple(checks),
    )


def show(report: Report, console: Console) -> None:
    """Print the table, the latencies and the checks."""
    begun = min(line.published_at for line in report.versions if line.published_at)
    line = report.versions[0].name.rpartition("-v")[0]
    table = _table(f"{line}: seconds since the first version was published")
    for column in ("", "digest"):
        table.add_column(column, no_wrap=True)
    for column in ("at", *report.replicas, "now"):
        table.add_column(column)
    for row in report.versions:
        table.add_row(
            f"v{row.version}",
            (row.digest or "")[:7],
            _since(begun, row.published_at),
            *(_cell_text(begun, row.replicas[replica]) for replica in report.replicas),
            row.role if row.state == "published" else row.state,
        )
    console.print(table)
    console.print(_latency_table(report))
    for check in report.checks:
        mark = "[green]ok[/green]    " if check.ok else "[bold red]MISSED[/bold red]"
        verdict = f"{mark} {check.name}: {escape(check.title)} ({escape(check.detail)})"
        console.print(verdict, soft_wrap=True, highlight=False)
    console.print(f"{report.engine} engine, {report.duration_s:.1f} s")


def _table(title: str) -> Table:
    """Narrow enough for two replicas in 80 columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def _latency_table(report: Report) -> Table:
    table = _table("from publish to ack")
    table.add_column("phase")
    for column in ("n", "p50 ms", "p95 ms"):
        table.add_column(column, justify="right")
    rows: Mapping[str, Latency | None] = {"whole": report.publish_to_ack, **report.phases}
    for name, quantiles in rows.items():
        if quantiles is not None:
            values = (f"{quantiles.p50_s * 1e3:.1f}", f"{quantiles.p95_s * 1e3:.1f}")
            table.add_row(name, str(quantiles.n), *values)
    return table


def _cell_text(begun: str, cell: Cell) -> Text:
    if cell.acked_at is None:
        return Text(cell.state, "dim")
    text = Text(f"acked {_since(begun, cell.acked_at)}", "green" if cell.state == "acked" else "")
    if cell.evicted_at is not None and cell.state == "evicted":
        text.append(f" evicted {_since(begun, cell.evicted_at)}", "dim")
    elif cell.state != "acked":
        text.append(f", {cell.state}", "red")
    return text


def _since(begun: str, moment: str | None) -> str:
    return "" if moment is None else f"{_between(begun, moment):.2f}"


def _between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
