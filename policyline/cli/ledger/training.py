"""What the trainer recorded with each version: the steps that led to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from policyline.cli.output import print_table
from policyline.ledger.canonical import parse_object
from policyline.ledger.rows import VersionRow

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


def metadata_of(row: VersionRow) -> Mapping[str, Any]:
    """What was recorded with a version; empty before it is published."""
    try:
        found = parse_object(row.manifest or "{}").get("metadata", {})
    except ValueError:  # verify reports it
        return {}
    return found if isinstance(found, dict) else {}


def print_training(rows: Sequence[VersionRow]) -> None:
    """A table of the training steps behind the versions; nothing where no trainer recorded any."""
    known = [(row.version, metadata_of(row)) for row in rows]
    known = [(version, metadata) for version, metadata in known if "step" in metadata]
    if known:
        print_table(
            ("version", *_COLUMNS.values()),
            [(version, *(_shown(m.get(key)) for key in _COLUMNS)) for version, m in known],
        )


def _shown(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
