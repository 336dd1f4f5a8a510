"""The window rule: which versions of a line are to be served, and in which order to load them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from policyline.ledger.db import schema, statements
from policyline.ledger.db.statements import bind, columns_of, constant, read_all, read_rows, row_of
from policyline.ledger.db.transaction import Prepared
from policyline.ledger.errors import REPAIR_HINT, Corrupted
from policyline.ledger.line_snapshot import DesiredVersion, Role
from policyline.ledger.names import policy_name
from policyline.ledger.rows import LineRow, RunRow, VersionRow


def read_desired(
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
    for is_pinned, *columns in read_all(connection, _WINDOW_AND_PINNED, values):
        (pinned if is_pinned else window).append(row_of(VersionRow, columns))
    window.sort(key=lambda row: row.became_current_seq or 0, reverse=True)
    pinned.sort(key=lambda row: row.version, reverse=True)
    return window, pinned


def read_run(connection: Connection, run: str) -> RunRow | None:
    """One run in the caller's transaction."""
    found = read_rows(connection, statements.ROW_BY_KEY[RunRow], RunRow, {"run": run})
    return found[0] if found else None


_OF = schema.versions.c
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
