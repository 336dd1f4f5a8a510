"""`policyline ledger versions`: what became of each, the training behind it, and two compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from policyline.cli.ledger.arguments import RunOption, known_line, version_json, version_number
from policyline.cli.options import JsonOption, LedgerOption, LineOption
from policyline.cli.output import clock, megabytes, print_json, print_table, short
from policyline.ledger import Ledger
from policyline.ledger.canonical import parse_object
from policyline.ledger.errors import NotFound
from policyline.ledger.line_snapshot import LineSnapshot
from policyline.ledger.manifest import Manifest
from policyline.ledger.names import DEFAULT_LINE, policy_name
from policyline.ledger.rows import VersionRow

ABSENT = "(absent)"
_COLUMNS: Final[Mapping[str, str]] = {
    "step": "step",
    "learning_rate": "lr",
    "loss": "loss",
    "reward": "reward",
    "ratio": "ratio",
    "kl": "kl",
    "staleness_mean": "staleness",
    "grad_norm": "grad norm",
    "step_s": "step s",
    "flag": "flag",
}
"""Key of a version's metadata -> its column."""
DiffOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--diff",
        help="Compare two versions: configuration, metadata, files.",
    ),
]


def versions(
    ledger: LedgerOption,
    run: RunOption = None,
    line: LineOption = DEFAULT_LINE,
    diff: DiffOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the versions of a line or a run with what became of each, or compare two."""
    with Ledger(ledger) as opened:
        if diff is not None:
            _show_difference(opened, line, diff, as_json=as_json)
            return
        line = known_line(opened, line) if run is None else opened.run(run).line
        rows = opened.versions(run=run, line=line)
        view = opened.view(line, also=[r.version for r in rows])
    if as_json:
        print_json(
            [
                {
                    **version_json(r),
                    "acked_by": view.acked_by(r.version),
                    "metadata": _metadata_of(r),
                }
                for r in rows
            ]
        )
        return
    print_table(
        ("version", "run", "state", "role", "digest", "MB", "published", "acked by", "reason"),
        [
            (
                r.version,
                r.run,
                r.state,
                _role(view, r),
                short(r.digest),
                megabytes(r.size_bytes),
                clock(r.published_at),
                " ".join(view.acked_by(r.version)) or None,
                r.reason or None,
            )
            for r in rows
        ],
    )
    _print_training(rows)


def _role(view: LineSnapshot, row: VersionRow) -> str | None:
    desired = next((d.role for d in view.desired if d.version == row.version), None)
    if desired is not None or row.state != "published":
        return desired
    return "waiting" if row.became_current_seq is None else "out_of_window"


def _metadata_of(row: VersionRow) -> Mapping[str, Any]:
    """What was recorded with a version; empty before it is published."""
    try:
        found = parse_object(row.manifest or "{}").get("metadata", {})
    except ValueError:  # verify reports it
        return {}
    return found if isinstance(found, dict) else {}


def _print_training(rows: Sequence[VersionRow]) -> None:
    """A table of the training steps behind the versions; nothing where no trainer recorded any."""
    known = [(row.version, _metadata_of(row)) for row in rows]
    known = [(version, metadata) for version, metadata in known if "step" in metadata]
    if known:
        print_table(
            ("version", *_COLUMNS.values()),
            [(version, *(_shown(m.get(key)) for key in _COLUMNS)) for version, m in known],
        )


def _shown(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def _show_difference(ledger: Ledger, line: str, pair: tuple[str, str], *, as_json: bool) -> None:
    """Print what differs between two published versions."""
    one, two = (_manifest(ledger, line, version_number(line, text)) for text in pair)
    found = _difference(one, two)
    if as_json:
        print_json([{"field": f, "a": a, "b": b} for f, a, b in found])
    elif found:
        print_table(("field", one.name, two.name), found)
    else:
        sys.stdout.write(f"{one.name} and {two.name} are the same but for the name\n")


def _difference(one: Manifest, two: Manifest) -> list[tuple[str, Any, Any]]:
    """(field, value in one, value in two) wherever two manifests differ, by field."""
    a, b = _flat(one), _flat(two)
    return [
        (field, a.get(field, ABSENT), b.get(field, ABSENT))
        for field in sorted(a.keys() | b.keys())
        if a.get(field, ABSENT) != b.get(field, ABSENT)
    ]


def _flat(manifest: Manifest) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "run": manifest.run,
        "epoch": manifest.epoch,
        "digest": manifest.digest,
        "size_bytes": manifest.size_bytes,
    }
    flat |= {f"adapter.{k}": v for k, v in manifest.adapter.items()}
    flat |= {f"metadata.{k}": v for k, v in manifest.metadata.items()}
    for entry in manifest.files:
        flat[f"files.{entry.path}"] = f"{entry.size_bytes} bytes, sha256 {entry.sha256[:16]}"
    return flat


def _manifest(ledger: Ledger, line: str, version: int) -> Manifest:
    row = ledger.version(line, version)
    if row.manifest is None:
        raise NotFound(f"{policy_name(line, version)} is {row.state}: it has no manifest")
    return Manifest.from_text(row.manifest)
