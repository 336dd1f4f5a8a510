"""`ledger versions --diff A B`."""

from __future__ import annotations

import sys
from typing import Any

from policyline.cli.ledger.arguments import version_number
from policyline.cli.output import print_json, print_table
from policyline.ledger import Ledger
from policyline.ledger.errors import NotFound
from policyline.ledger.manifest import Manifest
from policyline.ledger.names import policy_name

ABSENT = "(absent)"


def show_difference(ledger: Ledger, line: str, pair: tuple[str, str], *, as_json: bool) -> None:
    """Print what differs between two published versions."""
    one, two = (_manifest(ledger, line, version_number(line, text)) for text in pair)
    found = difference(one, two)
    if as_json:
        print_json([{"field": f, "a": a, "b": b} for f, a, b in found])
    elif found:
        print_table(("field", one.name, two.name), found)
    else:
        sys.stdout.write(f"{one.name} and {two.name} are the same but for the name\n")


def difference(one: Manifest, two: Manifest) -> list[tuple[str, Any, Any]]:
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
