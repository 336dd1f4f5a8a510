"""Views of a line, built by a few words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from policyline.ledger.line_snapshot import DesiredVersion, LineSnapshot, Role
from policyline.ledger.names import policy_name
from policyline.ledger.rows import (
    LineRow,
    ReplicaRow,
    ReplicaState,
    ResidencyRow,
    VersionRow,
    VersionState,
)

LINE = "trl-policy"


def digest(version: int) -> str:
    return hashlib.sha256(str(version).encode()).hexdigest()


def version_row(
    version: int,
    state: VersionState = "published",
    *,
    run: str = "run",
    was_current: bool = True,
    reason: str = "",
) -> VersionRow:
    return VersionRow(
        line=LINE,
        version=version,
        run=run,
        epoch=1,
        attempt="a",
        state=state,
        publisher="p",
        reserved_seq=version,
        digest=digest(version) if state != "reserved" else None,
        became_current_seq=version if was_current else None,
        reason=reason,
    )


def replica_row(
    name: str,
    incarnation: str | None = "1",
    *,
    state: ReplicaState = "joined",
    slots: int | None = 6,
    url: str | None = None,
) -> ReplicaRow:
    return ReplicaRow(
        line=LINE,
        replica=name,
        generation=1,
        state=state,
        incarnation=incarnation,
        url=f"http://{name}" if url is None else url,
        build="b",
        max_loras=slots,
        joined_seq=1,
        joined_at="",
    )


def acked(replica: str, version: int, incarnation: str = "1", seq: int = 100) -> ResidencyRow:
    return ResidencyRow(
        line=LINE,
        replica=replica,
        version=version,
        state="acked",
        generation=1,
        incarnation=incarnation,
        digest=digest(version),
        acked_seq=seq,
    )


def line_view(
    *,
    current: int | None = 3,
    window: tuple[int, ...] = (2,),
    candidate: int | None = None,
    replicas: tuple[ReplicaRow, ...] = (),
    residency: tuple[ResidencyRow, ...] = (),
    others: Mapping[int, VersionRow] | None = None,
    next_version: int = 10,
    open_run: str | None = "run",
) -> LineSnapshot:
    roles: dict[int, Role] = {}
    if current is not None:
        roles[current] = "current"
    if candidate is not None:
        roles[candidate] = "candidate"
    roles |= dict.fromkeys(window, "window")
    desired = tuple(
        DesiredVersion(v, policy_name(LINE, v), digest(v), role, version_row(v))
        for v, role in roles.items()
    )
    return LineSnapshot(
        ledger_id="l",
        seq=1,
        line=LineRow(LINE, next_version, 1, open_run, current, candidate),
        run=None,
        desired=desired,
        replicas={r.replica: r for r in replicas},
        residency={(r.replica, r.version): r for r in residency},
        others=dict(others or {}),
    )
