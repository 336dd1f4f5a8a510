"""Arguments that several ledger commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from ledger.names import parse_policy_name

FromOption = Annotated[
    int, typer.Option("--from", envvar="POLICYLINE_FROM", min=1, help="First event (seq).")
]
ToOption = Annotated[
    int | None, typer.Option("--to", envvar="POLICYLINE_TO", min=1, help="Last event (seq).")
]
VersionArgument = Annotated[str, typer.Argument(help="Version: a number, or its policy name.")]


def version_number(line: str, text: str) -> int:
    """The number in `7`, `v7` or `trl-policy-v7`.

    Raises:
        typer.BadParameter: none of these.
    """
    bare = text.removeprefix("v")
    if bare.isascii() and bare.isdigit() and int(bare) > 0:
        return int(bare)
    named = parse_policy_name(line, text)
    if named is None:
        raise typer.BadParameter(
            f"version {text!r} is neither a number nor a name of line {line!r}; "
            f"write 7 or {line}-v7"
        )
    return named
