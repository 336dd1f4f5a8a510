"""Copies that belong to no version of the ledger."""

from __future__ import annotations

from dataclasses import replace

from policyline.watcher.core import reconcile_state
from policyline.watcher.core.model import Known
from policyline.watcher.core.plan import plan
from policyline.watcher.core.reconcile_state import ReconcileState
from tests.unit.watcher.builders import HOME, LIMITS, NOW, actions, desired, known, path, version

SERVED, STRANGER = version(1, "current", "acked"), version(9, None)
OTHER = "/cache/another-ledger"
WHAT = desired(SERVED)


def seen(**more: object) -> Known:
    observed = known([SERVED], local=[SERVED, STRANGER])
    return replace(observed, stale_caches=frozenset({OTHER}), **more)  # type: ignore[arg-type] # fields


def orphans(observed: Known) -> set[str]:
    return reconcile_state.orphans(WHAT, observed)


def test_what_no_version_has_is_orphaned() -> None:
    assert orphans(seen()) == {path(STRANGER), OTHER}


def test_another_digest_of_a_known_version_is_orphaned() -> None:
    other = replace(SERVED, digest="f" * 64)

    assert orphans(replace(seen(), local=frozenset({SERVED.copy_name, other.copy_name}))) == {OTHER}
    unlisted = replace(seen(), local=frozenset({other.copy_name}), adapters={})
    assert orphans(unlisted) == {f"{HOME}/{other.copy_name}", OTHER}


def test_what_the_engine_may_read_is_not() -> None:
    assert orphans(seen(busy=None)) == set()
    assert orphans(seen(busy=frozenset({STRANGER.name}))) == set()
    assert orphans(seen(busy=frozenset({SERVED.name}))) == {path(STRANGER)}
    listed = {SERVED.name: path(SERVED), "x": path(STRANGER), "y": f"{OTHER}/trl-policy-v1-0"}
    assert orphans(seen(adapters=listed)) == set()


def test_an_empty_ledger_orphans_nothing() -> None:
    """I10."""
    assert reconcile_state.orphans(desired(), seen()) == set()


def test_they_go_after_the_grace() -> None:
    state = reconcile_state.note(ReconcileState(), WHAT, seen(), NOW)
    due_s = NOW + LIMITS.grace_s

    assert "DeleteStray" not in dict(actions(WHAT, seen(), state, now=due_s - 1))
    found = plan(WHAT, seen(), state, LIMITS, due_s)
    assert [getattr(a, "paths", ()) for a in found.actions][-1] == (OTHER, path(STRANGER))


def test_over_the_limit_the_oldest_out_of_window_goes_first_and_at_once() -> None:
    old, older = version(3, None, "evicted"), version(2, None, "evicted")
    observed = replace(known([SERVED], local=[SERVED, old, older]), over_limit=True)
    state = ReconcileState(alive_at_s=NOW, idle_since_s={2: NOW, 3: NOW})

    assert actions(desired(SERVED, older, old), observed, state) == [
        ("DeleteLocal", "trl-policy-v2")
    ]


def test_copies_from_before_the_start_are_verified_last_and_one_at_a_time() -> None:
    second = version(2, "window", "acked")
    observed = replace(known([SERVED, second]), verified=frozenset())
    state = ReconcileState(alive_at_s=NOW)

    assert actions(desired(SERVED, second), observed, state) == [("Verify", "trl-policy-v1")]
    half = replace(observed, verified=frozenset({SERVED.copy_name}))
    assert actions(desired(SERVED, second), half, state) == [("Verify", "trl-policy-v2")]
