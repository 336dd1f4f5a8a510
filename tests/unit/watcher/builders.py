"""Small builders for tests of the watcher's pure parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from policyline.ledger.line_snapshot import Role
from policyline.ledger.rows import ResidencyState
from policyline.watcher.core.model import Desired, Known, Limits, Unknown, Version
from policyline.watcher.core.plan import plan
from policyline.watcher.core.reconcile_state import ReconcileState

LINE = "trl-policy"
HOME = "/cache/ledger"
INCARNATION = "1000.5"
"""The engine's present incarnation."""
NOW = 100.0
LIMITS = Limits(max_loras=6, linger_s=2.0, grace_s=30.0, poll_interval_s=5.0)


def version(
    number: int,
    role: Role | None = "window",
    reported: ResidencyState | None = None,
    incarnation: str | None = None,
) -> Version:
    """A version; one reported acked is acked by the present incarnation."""
    if reported == "acked" and incarnation is None:
        incarnation = INCARNATION
    return Version(
        version=number,
        name=f"{LINE}-v{number}",
        digest=f"{number:016x}" + "0" * 48,
        role=role,
        reported=reported,
        incarnation=incarnation,
    )


def desired(*versions: Version, incarnation: str | None = INCARNATION) -> Desired:
    """The ledger's view: those with a role are wanted, in the given order."""
    return Desired(
        line=LINE,
        incarnation=incarnation,
        wanted=tuple(v for v in versions if v.role is not None),
        out_of_window=tuple(v for v in versions if v.role is None),
    )


def path(listed: Version) -> str:
    """Where our copy of a version is."""
    return f"{HOME}/{listed.copy_name}"


def known(
    listed: Iterable[Version] = (),
    local: Iterable[Version] | None = None,
    *,
    busy: frozenset[str] | None = frozenset(),
    incarnation: str = INCARNATION,
    foreign: Mapping[str, str] | None = None,
) -> Known:
    """An observation: `listed` from our copies, which are there unless `local` says otherwise."""
    listed = tuple(listed)
    return Known(
        incarnation=incarnation,
        adapters={**{v.name: path(v) for v in listed}, **(foreign or {})},
        busy=busy,
        home=HOME,
        local=frozenset(v.copy_name for v in (listed if local is None else local)),
    )


def actions(
    what: Desired | Unknown,
    observed: Known | Unknown,
    state: ReconcileState | None = None,
    limits: Limits = LIMITS,
    now: float = NOW,
) -> list[tuple[str, str]]:
    """The plan as (action, name) in order."""
    shown = []
    for action in plan(what, observed, state or ReconcileState(), limits, now).actions:
        targets = getattr(action, "targets", (getattr(action, "target", action),))
        shown += [(type(action).__name__, str(getattr(t, "name", ""))) for t in targets]
    return shown
