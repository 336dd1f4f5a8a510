"""Checkpoints: notes of what each line served, so that as-of need not fold from the beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import asdict

from policyline.ledger.canonical import canonical, parse_object
from policyline.ledger.disk_projections import DiskProjections
from policyline.ledger.errors import REPAIR_HINT, Corrupted
from policyline.ledger.projection_store import InMemoryProjections
from policyline.ledger.rows import LineRow, ReplicaRow, ResidencyRow, Row

CHECKPOINT_EVERY = 1000
"""Events between two notes: folding so many takes tens of milliseconds, noting takes one."""


def checkpoint_text(
    line: LineRow, replicas: Collection[ReplicaRow], acked: Collection[ResidencyRow]
) -> str:
    """What the fold needs to go on from here, as canonical JSON.

    Args:
        line: the line.
        replicas: its replicas that are joined.
        acked: rows of the line in state `acked`; those of another incarnation are left out.
    """
    present = {r.replica: r.incarnation for r in replicas}
    in_force = [r for r in acked if present.get(r.replica) == r.incarnation]
    return canonical(
        {
            "line": asdict(line),
            "replicas": [asdict(r) for r in sorted(replicas, key=lambda r: r.replica)],
            "residency": [asdict(r) for r in sorted(in_force, key=lambda r: r.key)],
        }
    )


def line_states(tables: InMemoryProjections | DiskProjections) -> dict[str, str]:
    """Line -> checkpoint text, from folded rows."""
    replicas = [r for r in tables.rows(ReplicaRow) if r.state == "joined"]
    return {
        line.line: checkpoint_text(
            line,
            [r for r in replicas if r.line == line.line],
            [r for r in tables.acked.values() if r.line == line.line],
        )
        for line in tables.rows(LineRow)
    }


def text_hash(text: str) -> str:
    """sha256 hex of a checkpoint."""
    return hashlib.sha256(text.encode()).hexdigest()


def rows_of(text: str) -> list[Row]:
    """The rows that a checkpoint holds.

    Raises:
        Corrupted: it cannot be read.
    """
    try:
        state = parse_object(text)
        return [
            LineRow(**state["line"]),
            *(ReplicaRow(**r) for r in state["replicas"]),
            *(ResidencyRow(**r) for r in state["residency"]),
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupted(f"a checkpoint cannot be read: {error!r:.100}", hint=REPAIR_HINT) from error
