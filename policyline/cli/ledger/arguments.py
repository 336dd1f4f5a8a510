"""Arguments that several ledger commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from policyline.cli.output import as_fields
from policyline.ledger import Ledger
from policyline.ledger.canonical import parse_object
from policyline.ledger.errors import REPAIR_HINT, Corrupted, NotFound
from policyline.ledger.events import Event
from policyline.ledger.names import check_line, parse_policy_name, policy_name
from policyline.ledger.rows import VersionRow

MOST = 10**18 - 1
"""Of an event's number and of a count; databases hold 64 bits."""

FromOption = Annotated[
    int,
    typer.Option("--from", min=1, max=MOST, help="First event (seq)."),
]
ToOption = Annotated[
    int | None,
    typer.Option("--to", min=1, max=MOST, help="Last event (seq)."),
]
RunOption = Annotated[str | None, typer.Option("--run", help="Only this run.")]
VersionArgument = Annotated[str, typer.Argument(help="Version: a number, or its policy name.")]


def check_order(first: int, last: int | None) -> None:
    """Refuse a span of events that ends before it begins, which would look like an empty one.

    Raises:
        typer.BadParameter: it does.
    """
    if last is not None and last < first:
        raise typer.BadParameter(f"--from {first} comes after --to {last}; swap them")


def known_line(ledger: Ledger, line: str) -> str:
    """`line`, unless that is a slip of the pen: others are in this ledger and it is not.

    Raises:
        InvalidName: it could not be a line.
        NotFound: with the lines there are.
    """
    check_line(line)
    known = [row.line for row in ledger.lines()]
    if known and line not in known and not ledger.replicas(line):
        raise NotFound(f"line {line!r} is not in this ledger (there are: {', '.join(known[:5])})")
    return line


def version_number(line: str, text: str) -> int:
    """The number in `7`, `v7` or `trl-policy-v7`.

    Raises:
        typer.BadParameter: none of these.
    """
    named = parse_policy_name(line, text) or parse_policy_name(
        line, f"{line}-v{text.removeprefix('v')}"
    )
    if named is None:
        raise typer.BadParameter(
            f"version {text!r} is neither a number nor a name of line {line!r}; "
            f"write 7 or {line}-v7"
        )
    return named


def version_json(row: VersionRow) -> dict[str, Any]:
    """A version's columns, with the manifest as the object that it is.

    Raises:
        Corrupted: it cannot be read.
    """
    if row.manifest is None:
        return as_fields(row)
    try:
        return as_fields(row) | {"manifest": parse_object(row.manifest)}
    except ValueError as error:
        name = policy_name(row.line, row.version)
        raise Corrupted(
            f"the manifest of {name} is unreadable: {error}", hint=REPAIR_HINT
        ) from error


def event_json(event: Event) -> dict[str, Any]:
    """Every column, and the payload parsed."""
    return {**{n: getattr(event, n) for n in Event.__slots__}, "payload": event.data}
