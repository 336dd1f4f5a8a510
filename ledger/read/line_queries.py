"""Reads the snapshot of one line.

Daemons do so at each wake, between the signal and the first byte of a copy: few statements, each
compiled once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.db import schema, statements
from policyline.ledger.db.statements import R, bind, columns_of, constant, row_of, scan
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.errors import REPAIR_HINT, Corrupted
from policyline.ledger.line_snapshot import DesiredVersion, LineSnapshot, Role
from policyline.ledger.names import policy_name
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, Row, RunRow, VersionRow


def read_snapshot(
    connection: Connection, line: str, also: Collection[int], replica: str | None = None
) -> LineSnapshot | None:
    """The line in the caller's transaction; None when the ledger has lost its head row.

    Args:
        connection: in a transaction that is one snapshot.
        line: to read; one without events is empty.
        also: versions to include beyond the desired ones.
        replica: include only what this one reported, and what all did about the candidate; None
            for all.

    Raises:
        Corrupted: a desired version is not in the ledger.
    """
    found = _all(connection, _HEAD_LINE_RUN, {"line": line})
    if not found:
        return None
    ledger_id, seq, *columns = found[0]
    columns, current = _cut(VersionRow, columns)
    columns, candidate = _cut(VersionRow, columns)
    columns, run = _cut(RunRow, columns)
    _, row = _cut(LineRow, columns)
    row = row or LineRow(line=line)
    named = {version.version: version for version in (current, candidate) if version is not None}
    rows = {**named, **_versions(connection, _OTHERS, line, set(also) - named.keys())}
    desired = _desired(connection, row, run, named)
    wanted = {d.version for d in desired}
    others = {number: rows[number] for number in sorted(rows) if number not in wanted}
    return LineSnapshot(
        ledger_id=ledger_id,
        seq=seq,
        line=row,
        run=run,
        desired=desired,
        replicas={r.replica: r for r in read_replicas(connection, line)},
        residency={
            (r.replica, r.version): r
            for r in _residency(connection, row, wanted | others.keys(), replica)
        },
        others=others,
    )


_WIDTH: Final[Mapping[type[Row], int]] = {
    t: len(columns_of(t)) for t in (LineRow, RunRow, VersionRow)
}


def _cut(table: type[R], columns: list[Any]) -> tuple[list[Any], R | None]:
    """Split off a row made of the last columns; None if no row was joined."""
    width = _WIDTH[table]
    own = columns[-width:]
    return columns[:-width], None if own[0] is None else row_of(table, own)


def _residency(
    connection: Connection, line: LineRow, versions: Collection[int], replica: str | None
) -> Iterator[ResidencyRow]:
    """A watcher reads only its own rows: in a fleet of 64 the others' are hundreds."""
    for page in _pages(versions):
        values = {"line": line.line, **page}
        if replica is None:
            yield from _rows(connection, _RESIDENCY, ResidencyRow, values)
        else:
            values |= {"replica": replica, "candidate": line.candidate}
            yield from _rows(connection, _RESIDENCY_OF_ONE, ResidencyRow, values)


def _desired(
    connection: Connection, line: LineRow, run: RunRow | None, named: Mapping[int, VersionRow]
) -> tuple[DesiredVersion, ...]:
    """Window, candidate and versions pinned with serve, in the order in which to load."""
    chosen: dict[int, tuple[Role, VersionRow]] = {}
    roles: tuple[tuple[Role, int | None], ...] = (
        ("current", line.current),
        ("candidate", line.candidate),
    )
    for role, number in roles:
        if number is None:
            continue
        if number not in named:
            raise Corrupted(
                f"line {line.line!r} names {policy_name(line.line, number)} as its {role}, which "
                "is not in this ledger",
                hint=REPAIR_HINT,
            )
        chosen.setdefault(number, (role, named[number]))
    current = None if line.current is None else named[line.current]
    window, pinned = _window_and_pinned(connection, line.line, current, run)
    for role, among in (("window", window), ("pinned", pinned)):
        for row in among:
            chosen.setdefault(row.version, (role, row))
    return tuple(
        DesiredVersion(
            version=number,
            name=policy_name(line.line, number),
            digest=row.digest or "",
            role=role,
            row=row,
        )
        for number, (role, row) in chosen.items()
    )


def _window_and_pinned(
    connection: Connection, line: str, current: VersionRow | None, run: RunRow | None
) -> tuple[list[VersionRow], list[VersionRow]]:
    """The versions of current's run that were current before it, and those pinned with serve.

    Of the former `max_staleness`; each from new to old.
    """
    if current is not None and (run is None or run.run != current.run):
        run = read_run(connection, current.run)
    values: dict[str, Any] = {"line": line, "run": "", "before": 0, "most": 0}
    if current is not None and run is not None:
        before, most = current.became_current_seq or 0, run.max_staleness
        values |= {"run": current.run, "before": before, "most": most}
    window: list[VersionRow] = []
    pinned: list[VersionRow] = []
    for is_pinned, *columns in _all(connection, _WINDOW_AND_PINNED, values):
        (pinned if is_pinned else window).append(row_of(VersionRow, columns))
    window.sort(key=lambda row: row.became_current_seq or 0, reverse=True)
    pinned.sort(key=lambda row: row.version, reverse=True)
    return window, pinned


def read_run(connection: Connection, run: str) -> RunRow | None:
    """One run in the caller's transaction."""
    found = _rows(connection, statements.ROW_BY_KEY[RunRow], RunRow, {"run": run})
    return found[0] if found else None


def read_versions(
    connection: Connection, line: str, numbers: Collection[int]
) -> dict[int, VersionRow]:
    """Those of the versions that the ledger has, in the caller's transaction."""
    return _versions(connection, _VERSIONS, line, numbers)


def _versions(
    connection: Connection, statement: Prepared, line: str, numbers: Collection[int]
) -> dict[int, VersionRow]:
    return {
        row.version: row
        for page in _pages(numbers)
        for row in _rows(connection, statement, VersionRow, {"line": line, **page})
    }


def read_replicas(connection: Connection, line: str) -> list[ReplicaRow]:
    """Replicas of a line by name, those that left included, in the caller's transaction."""
    return _rows(connection, _REPLICAS, ReplicaRow, {"line": line})


_PAGE: Final = 16
"""Numbers that one statement asks for: compiled once, it cannot expand a list."""


def _pages(numbers: Collection[int]) -> Iterator[dict[str, int]]:
    """The numbers as parameters, the last of them repeated until a page is full."""
    ordered = sorted(numbers)
    for start in range(0, len(ordered), _PAGE):
        page = ordered[start : start + _PAGE]
        page += page[-1:] * (_PAGE - len(page))
        yield {f"v{index}": number for index, number in enumerate(page)}


def _in_page(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    return column.in_([bind(f"v{index}") for index in range(_PAGE)])


_LINES, _OF = schema.lines.c, schema.versions.c


def _head_line_run() -> sa.Select[Any]:
    """One row: the line, its open run, and the versions that it names."""
    head, runs = schema.head, schema.runs
    current, candidate = schema.versions.alias("of_current"), schema.versions.alias("of_candidate")
    joined = (
        head.outerjoin(schema.lines, _LINES.line == bind("line"))
        .outerjoin(runs, runs.c.run == _LINES.open_run)
        .outerjoin(
            candidate,
            (candidate.c.line == _LINES.line) & (candidate.c.version == _LINES.candidate),
        )
        .outerjoin(current, (current.c.line == _LINES.line) & (current.c.version == _LINES.current))
    )
    columns = [*columns_of(LineRow), *columns_of(RunRow)]
    for table in (candidate, current):
        columns += [table.c[column.name] for column in columns_of(VersionRow)]
    # two tables have a column `line`
    labelled = [column.label(f"c{number}") for number, column in enumerate(columns)]
    return sa.select(head.c.ledger_id, head.c.seq, *labelled).select_from(joined)


_HEAD_LINE_RUN = Prepared(_head_line_run())
_VERSIONS = scan(VersionRow, _OF.line == bind("line"), _in_page(_OF.version))
_OTHERS = Prepared(
    sa.select(*(sa.null() if c is _OF.manifest else c for c in columns_of(VersionRow))).where(
        _OF.line == bind("line"), _in_page(_OF.version)
    )
)
"""The same without the manifests."""
_BEFORE = (
    sa.select(sa.literal_column("0").label("pinned"), *columns_of(VersionRow))
    .where(
        _OF.run == bind("run"),
        _OF.became_current_seq < bind("before"),
        _OF.state == constant("published"),
    )
    .order_by(_OF.became_current_seq.desc())
    .limit(bind("most"))
)
_PINNED = sa.select(sa.literal_column("1").label("pinned"), *columns_of(VersionRow)).where(
    _OF.line == bind("line"),
    _OF.pin == constant("serve"),
    _OF.state != constant("withdrawn"),
)
_WINDOW_AND_PINNED = Prepared(sa.union_all(sa.select(_BEFORE.subquery()), _PINNED))
_REPLICAS = Prepared(
    sa.select(*columns_of(ReplicaRow))
    .where(schema.replicas.c.line == bind("line"))
    .order_by(schema.replicas.c.replica)
)
_REPORTED = schema.residency.c
_RESIDENCY = scan(ResidencyRow, _REPORTED.line == bind("line"), _in_page(_REPORTED.version))

_RESIDENCY_OF_ONE = Prepared(
    sa.union_all(
        sa.select(*columns_of(ResidencyRow)).where(
            _REPORTED.line == bind("line"),
            _REPORTED.replica == bind("replica"),
            _in_page(_REPORTED.version),
        ),
        sa.select(*columns_of(ResidencyRow)).where(
            _REPORTED.line == bind("line"), _REPORTED.version == bind("candidate")
        ),
    )
)
"""What one replica reported about the versions, and what all did about the candidate."""


def _rows(
    connection: Connection, statement: Prepared, table: type[R], values: Mapping[str, Any]
) -> list[R]:
    return [row_of(table, row) for row in _all(connection, statement, values)]


def _all(
    connection: Connection, statement: Prepared, values: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    rendered = statement.render(connection.dialect, values)
    return [tuple(row) for row in connection.exec_driver_sql(*rendered)]
