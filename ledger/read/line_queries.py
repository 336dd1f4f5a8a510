"""Reads the snapshot of one line.

Daemons do so at each wake, between the signal and the first byte of a copy: few statements, each
compiled once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.db import schema
from policyline.ledger.db.statements import R, bind, columns_of, read_all, read_rows, row_of, scan
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.read.window import read_desired
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
    found = read_all(connection, _HEAD_LINE_RUN, {"line": line})
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
    desired = read_desired(connection, row, run, named)
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
            yield from read_rows(connection, _RESIDENCY, ResidencyRow, values)
        else:
            values |= {"replica": replica, "candidate": line.candidate}
            yield from read_rows(connection, _RESIDENCY_OF_ONE, ResidencyRow, values)


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
        for row in read_rows(connection, statement, VersionRow, {"line": line, **page})
    }


def read_replicas(connection: Connection, line: str) -> list[ReplicaRow]:
    """Replicas of a line by name, those that left included, in the caller's transaction."""
    return read_rows(connection, _REPLICAS, ReplicaRow, {"line": line})


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
