"""Every hot query finds its rows by an index, on both databases, with thousands of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from policyline.ledger import Ledger
from policyline.ledger.append import unit_of_work
from policyline.ledger.db import connect as connections
from policyline.ledger.db import schema, statements
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.rollouts import RolloutFilter
from policyline.ledger.rows import ResidencyRow, VersionRow
from tests.behind_the_back import run_sql
from tests.ledger_builders import LINE
from tests.postgres import PostgresServer, fresh_database

VERSIONS = 1500
RUNS = 20
RUNS_WITHOUT_VERSIONS = 300
REPLICAS = 4
ROLLOUTS = 4000
BIG = ("events", "versions", "residency", "rollouts", "phases", "checkpoints", "runs")
"""Tables that grow with a run; `lines`, `replicas` and `heartbeats` have as many rows as there are
lines and servers, and a scan of them is right."""


def rows() -> Iterator[tuple[sa.Table, dict[str, Any]]]:
    """A long life, made up: plans depend on sizes and spreads, not on what is true."""
    seq = 0

    def event(kind: str, version: int | None, replica: str | None = None) -> dict[str, Any]:
        nonlocal seq
        seq += 1
        return {
            "seq": seq,
            "line": LINE,
            "run": f"run{(version or 1) % RUNS}",
            "kind": kind,
            "version": version,
            "replica": replica,
            "actor": "a",
            "epoch": seq // 1000,
            "generation": 1,
            "key": f"key{seq}",
            "payload": "{}",
            "recorded_at": f"2026-01-01T{seq:016d}",
            "prev_hash": "0" * 64,
            "hash": "0" * 64,
        }

    line = {"line": LINE, "next_version": VERSIONS, "open_run": "run0", "current": VERSIONS - 15}
    yield schema.lines, _row(schema.lines, **line)
    for number in range(RUNS + RUNS_WITHOUT_VERSIONS):
        yield schema.runs, _row(schema.runs, run=f"run{number}", line=LINE, max_staleness=4)
    for number in range(REPLICAS):
        of_replica = {"line": LINE, "replica": f"r{number}"}
        yield schema.replicas, _row(schema.replicas, state="joined", **of_replica)
        yield schema.heartbeats, _row(schema.heartbeats, **of_replica)
    for version in range(1, VERSIONS + 1):
        yield schema.events, event("version_reserved", version)
        yield schema.events, event("version_published", version)
        yield (
            schema.versions,
            _row(
                schema.versions,
                line=LINE,
                version=version,
                run=f"run{version % RUNS}",
                state="published",
                digest=f"{version:064x}"[::-1],
                published_seq=seq,
                became_current_seq=seq if version < VERSIONS - 3 else None,
            ),
        )
        for number in range(REPLICAS):
            yield schema.events, event("version_acked", version, f"r{number}")
            yield (
                schema.residency,
                _row(
                    schema.residency,
                    line=LINE,
                    replica=f"r{number}",
                    version=version,
                    state="acked" if version > VERSIONS - 6 else "evicted",
                    digest=f"{version:064x}"[::-1],
                    incarnation="1",
                    acked_seq=seq,
                ),
            )
            yield (
                schema.phases,
                _row(
                    schema.phases, line=LINE, version=version, seq=seq, run=f"run{version % RUNS}"
                ),
            )
        if version % 100 == 0:
            yield schema.events, event("replica_joined", None, f"r{version // 100 % REPLICAS}")
            yield schema.events, event("epoch_claimed", None)
        if seq // 100 != (seq - 6) // 100:
            yield schema.checkpoints, {"line": LINE, "seq": seq, "state": "{}"}
    for number in range(1, ROLLOUTS + 1):
        yield (
            schema.rollouts,
            _row(
                schema.rollouts,
                request=f"q{number}",
                line=LINE,
                run="run1",
                version=number % VERSIONS + 1,
                replica=f"r{number % REPLICAS}",
                started_at=f"2026-01-01T{number:08d}",
            ),
        )


def _row(table: sa.Table, **given: object) -> dict[str, Any]:
    """The columns that are not given get a value of their type."""
    row: dict[str, Any] = {}
    for column in table.columns:
        if column.name == "id":
            continue
        blank: object = "" if isinstance(column.type, sa.Text) else 0
        if isinstance(column.type, sa.Boolean):
            blank = False
        row[column.name] = given.get(column.name, None if column.nullable else blank)
    return row


def fill(url: str, *, analyse: bool) -> None:
    engine = connections.connect(connections.ledger_url(url))
    grouped: dict[str, list[dict[str, Any]]] = {}
    tables = {}
    for table, row in rows():
        tables[table.name] = table
        grouped.setdefault(table.name, []).append(row)
    with engine.connect().execution_options(write=True) as connection:
        for name, many in grouped.items():
            connection.execute(sa.insert(tables[name]), many)
        connection.execute(sa.update(schema.head).values(seq=len(grouped["events"])))
        connection.commit()
    if analyse:
        run_sql(url, "ANALYZE")
    engine.dispose()


@pytest.fixture(scope="module", params=["sqlite", "sqlite analysed", "postgres"])
def full(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ledger]:
    """A ledger with thousands of rows; nobody changes it.

    Nobody runs ANALYZE on SQLite unless an operator does; Postgres does it by itself.
    """
    if request.param.startswith("sqlite"):
        url = str(tmp_path_factory.mktemp("full") / "ledger.db")
        upgrade_url(url)
        fill(url, analyse=request.param.endswith("analysed"))
        with Ledger(url) as ledger:
            yield ledger
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with contextmanager(fresh_database)(server) as url:
        fill(url, analyse=True)
        with Ledger(url) as ledger:
            yield ledger


def plans_of(ledger: Ledger, call: Callable[[Ledger], object]) -> dict[str, str]:
    """Statement -> plan, for each statement that the call runs."""
    ran: list[tuple[str, Any]] = []

    def note(_c: object, _cursor: object, statement: str, parameters: Any, *_rest: object) -> None:
        if statement.startswith("SELECT"):
            ran.append((statement, parameters))

    sa.event.listen(ledger._engine, "before_cursor_execute", note)
    try:
        call(ledger)
    finally:
        sa.event.remove(ledger._engine, "before_cursor_execute", note)
    return {statement: explain(ledger, statement, parameters) for statement, parameters in ran}


def explain(ledger: Ledger, statement: str, parameters: Any) -> str:
    how = "EXPLAIN QUERY PLAN " if ledger.is_sqlite else "EXPLAIN "
    with ledger._engine.connect() as connection:
        found = connection.exec_driver_sql(how + statement, parameters).fetchall()
    return "\n".join(str(row[-1]) for row in found)


def scanned(plan: str) -> set[str]:
    """The big tables of which the plan reads every row."""
    found = re.findall(r"Seq Scan on (\w+)|SCAN (\w+)(?! USING (?:COVERING )?INDEX)", plan)
    return {name for pair in found for name in pair} & set(BIG)


READS: dict[str, tuple[Callable[[Ledger], object], list[str]]] = {
    "view": (
        lambda ledger: ledger.view(LINE, also=[3, 4]),
        ["versions_pkey", "versions_by_current", "versions_pinned", "residency_by_version"],
    ),
    "view for one replica": (
        lambda ledger: ledger.view(LINE, also=[3, 4], replica="r1"),
        ["versions_pkey", "versions_by_current", "versions_pinned", "residency_pkey"],
    ),
    "version by key": (lambda ledger: ledger.version(LINE, 700), ["versions_pkey"]),
    "events by version": (
        lambda ledger: list(ledger.events(line=LINE, version=700)),
        ["events_by_version"],
    ),
    "events after seq": (
        lambda ledger: list(ledger.events(after=5000, limit=10)),
        ["events_pkey"],
    ),
    "events between, of a line": (  # as-of
        lambda ledger: list(ledger.events(after=5000, line=LINE, last=5900)),
        ["events_pkey"],
    ),
    "events of a run's end": (
        lambda ledger: list(ledger.events(after=9000, run="run3", limit=10)),
        ["events_pkey"],
    ),
    "rollouts by version": (
        lambda ledger: list(ledger.rollouts(RolloutFilter(line=LINE, version=700))),
        ["rollouts_by_version"],
    ),
    "counts of rollouts": (
        lambda ledger: ledger.rollout_counts(LINE, 700),
        ["rollouts_by_version"],
    ),
    "rollout by request": (
        lambda ledger: list(ledger.rollouts(RolloutFilter(request="q70", limit=1))),
        ["rollouts_request"],
    ),
    "checkpoint before": (
        lambda ledger: ledger.checkpoint_before(LINE, 5000),
        ["checkpoints_pkey"],
    ),
    "event of a time": (
        lambda ledger: ledger.last_seq_until("2026-01-01T0000000000005000"),
        ["events_pkey"],
    ),
    "version by digest": (
        lambda ledger: ledger.find_version(f"{700:064x}"[::-1][:12]),
        ["versions_by_digest"],
    ),
    "life of a replica": (
        lambda ledger: ledger.next_replica_events(LINE, "r1", 5000, 20),
        ["events_by_replica"],
    ),
    "phases by version": (
        lambda ledger: ledger.phases(line=LINE, version=700),
        ["phases_by_version"],
    ),
    "phases by run": (lambda ledger: ledger.phases(run="run3"), ["phases_by_run"]),
    "run by name": (lambda ledger: ledger.run("run3"), []),
    "head": (lambda ledger: ledger.extent(), []),
}


@pytest.mark.parametrize("name", READS)
def test_a_question_is_answered_by_indexes(full: Ledger, name: str) -> None:
    call, indexes = READS[name]
    plans = plans_of(full, call)
    assert plans
    for statement, plan in plans.items():
        assert not scanned(plan), f"{statement}\n{plan}"
    everything = "\n".join(plans.values())
    for index in indexes:
        assert uses(full, everything, index), f"{index} in\n{everything}"


def uses(ledger: Ledger, plan: str, index: str) -> bool:
    """SQLite has names of its own for the indexes of primary keys and constraints."""
    if not ledger.is_sqlite:
        return re.search(rf"\b{index}\b", plan) is not None
    table = index.split("_", maxsplit=1)[0]
    if index not in {"events_key", "rollouts_request"} and not index.endswith("_pkey"):
        return re.search(rf"INDEX {index}\b", plan) is not None
    own = rf"SEARCH {table} USING (INTEGER PRIMARY KEY|(COVERING )?INDEX sqlite_autoindex_{table}_)"
    return re.search(own, plan) is not None


APPENDS: dict[str, tuple[Prepared, dict[str, Any], str]] = {
    "event by key": (statements.EVENT_BY_KEY, {"key": "key70"}, "events_key"),
    "event of an epoch": (
        statements.EVENT_OF_EPOCH,
        {"line": LINE, "epoch": 9},
        "events_by_epoch",
    ),
    "version": (
        statements.ROW_BY_KEY[VersionRow],
        {"line": LINE, "version": 700},
        "versions_pkey",
    ),
    "residency": (
        statements.ROW_BY_KEY[ResidencyRow],
        {"line": LINE, "replica": "r1", "version": 700},
        "residency_pkey",
    ),
    "residency of the candidate": (
        unit_of_work._RESIDENCY,
        {"line": LINE, "version": 700},
        "residency_by_version",
    ),
    "waiting versions": (unit_of_work._WAITING, {"run": "run3"}, "versions_waiting"),
    "versions after": (
        unit_of_work._AFTER,
        {"line": LINE, "after": VERSIONS - 10},
        "versions_pkey",
    ),
    "acks in force": (unit_of_work._ACKED, {"line": LINE}, "residency_acked"),
}


@pytest.mark.parametrize("name", APPENDS)
def test_an_append_looks_up_by_indexes(full: Ledger, name: str) -> None:
    prepared, values, index = APPENDS[name]
    statement, parameters = prepared.render(full._engine.dialect, values)
    plan = explain(
        full, statement, parameters if isinstance(parameters, dict) else tuple(parameters)
    )
    assert not scanned(plan), f"{statement}\n{plan}"
    assert uses(full, plan, index), plan
