"""`policyline ledger audit`: the whole history of one version."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from policyline.cli.ledger.arguments import event_json, version_json, version_number
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import (
    clock,
    megabytes,
    print_fields,
    print_json,
    print_line,
    print_table,
)
from policyline.ledger import Ledger
from policyline.ledger.errors import NotFound
from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.read.audit import VersionAudit, audit, find_rollout
from policyline.ledger.read.replay import describe
from policyline.ledger.rollouts import RolloutRow


def audit_version(
    what: Annotated[
        str,
        typer.Argument(
            help="A version, a digest (8 or more hex digits), or a request's id: the router's "
            "header x-request-id, or the id in the answer's body."
        ),
    ],
    ledger: LedgerOption,
    line: LineOption = DEFAULT_LINE,
    as_json: JsonOption = False,
) -> None:
    """Show a version's full history: digest, publisher, and who served it from when to when.

    A digest may belong to several versions; a request's id leads to the version that answered it.
    """
    with Ledger(ledger) as opened:
        stories, rollout = _stories(opened, line, what)
    if as_json:
        print_json({"rollout": rollout, "versions": [_as_json(story) for story in stories]})
        return
    if rollout is not None:
        print_fields({name: getattr(rollout, name) for name in _SHOWN_OF_A_ROLLOUT})
        sys.stdout.write("\n")
    for story in stories:
        _print_story(story)


_SHOWN_OF_A_ROLLOUT = ("request", "asked_name", "version", "replica", "status", "started_at")
_HEX = re.compile("[0-9a-fA-F]{8,64}")


def _stories(ledger: Ledger, line: str, what: str) -> tuple[list[VersionAudit], RolloutRow | None]:
    rollout = find_rollout(ledger, what)
    if rollout is not None:
        return [audit(ledger, rollout.line, rollout.version)], rollout
    if _HEX.fullmatch(what) and not what.isdigit():
        rows = ledger.find_version(what.lower())
        if not rows:
            raise NotFound(f"no version has a digest that starts with {what}")
        return [audit(ledger, row.line, row.version) for row in rows], None
    try:
        number = version_number(line, what)
    except typer.BadParameter as error:
        raise NotFound(
            f"{what!r:.100} is no version of line {line!r}, no digest and no recorded request",
            hint=f"write 7 or {line}-v7, 8 or more digits of a digest, or a request's id",
        ) from error
    return [audit(ledger, line, number)], None


def _print_story(story: VersionAudit) -> None:
    row = story.row
    rollouts = ", ".join(f"{count} by {replica}" for replica, count in story.rollouts.items())
    print_fields(
        {
            "version": story.name,
            "state": row.state + (f" ({row.reason})" if row.reason else ""),
            "digest": row.digest,
            "size": None if row.size_bytes is None else f"{megabytes(row.size_bytes)} MB",
            "run": f"{row.run}, epoch {row.epoch}",
            "published by": row.publisher,
            "published": clock(row.published_at),
            "rollouts": rollouts or None,
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
        print_line(f"{event.seq:>8}  {clock(event.recorded_at)}  {describe(event)}")


def _as_json(story: VersionAudit) -> dict[str, Any]:
    return {
        "name": story.name,
        "version": version_json(story.row),
        "servings": story.servings,
        "phases": story.phases,
        "rollouts": story.rollouts,
        "events": [event_json(event) for event in story.events],
    }
