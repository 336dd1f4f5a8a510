"""Copies that belong to no version of the ledger."""

from __future__ import annotations

from dataclasses import replace

from policyline.watcher.core import memory as remember
from policyline.watcher.core.model import Known, Memory
from policyline.watcher.core.plan import plan
from tests.unit.watcher.builders import HOME, LIMITS, NOW, actions, desired, known, path, version

SERVED, STRANGER = version(1, "current", "acked"), version(9, None)
OTHER = "/cache/another-ledger"
WHAT = desired(SERVED)


def seen(**more: object) -> Known:
    observed = known([SERVED], local=[SERVED, STRANGER])
    return replace(observed, leftovers=frozenset({OTHER}), **more)  # type: ignore[arg-type] # fields


def strays(observed: Known) -> set[str]:
    return remember.strays(WHAT, observed)


def test_what_no_version_has_is_stray() -> None:
    assert strays(seen()) == {path(STRANGER), OTHER}


def test_another_digest_of_a_known_version_is_stray() -> None:
    other = replace(SERVED, digest="f" * 64)

    assert strays(replace(seen(), local=frozenset({SERVED.place, other.place}))) == {OTHER}
    unlisted = replace(seen(), local=frozenset({other.place}), adapters={})
    assert strays(unlisted) == {f"{HOME}/{other.place}", OTHER}


def test_what_the_engine_may_read_is_not() -> None:
    assert strays(seen(busy=None)) == set()
    assert strays(seen(busy=frozenset({STRANGER.name}))) == set()
    assert strays(seen(busy=frozenset({SERVED.name}))) == {path(STRANGER)}
    listed = {SERVED.name: path(SERVED), "x": path(STRANGER), "y": f"{OTHER}/trl-policy-v1-0"}
    assert strays(seen(adapters=listed)) == set()


def test_an_empty_ledger_makes_nothing_stray() -> None:
    """I10."""
    assert remember.strays(desired(), seen()) == set()


def test_they_go_after_the_grace() -> None:
    memory = remember.note(Memory(), WHAT, seen(), NOW)
    due_s = NOW + LIMITS.grace_s

    assert "DeleteStray" not in dict(actions(WHAT, seen(), memory, now=due_s - 1))
    found = plan(WHAT, seen(), memory, LIMITS, due_s)
    assert [getattr(a, "paths", ()) for a in found.actions][-1] == (OTHER, path(STRANGER))


def test_over_the_limit_the_oldest_outside_goes_first_and_at_once() -> None:
    old, older = version(3, None, "evicted"), version(2, None, "evicted")
    observed = replace(known([SERVED], local=[SERVED, old, older]), over_limit=True)
    memory = Memory(alive_at_s=NOW, idle_since_s={2: NOW, 3: NOW})

    assert actions(desired(SERVED, older, old), observed, memory) == [
        ("DeleteLocal", "trl-policy-v2")
    ]


def test_copies_from_before_the_start_are_verified_last_and_one_at_a_time() -> None:
    second = version(2, "window", "acked")
    observed = replace(known([SERVED, second]), verified=frozenset())
    memory = Memory(alive_at_s=NOW)

    assert actions(desired(SERVED, second), observed, memory) == [("Verify", "trl-policy-v1")]
    half = replace(observed, verified=frozenset({SERVED.place}))
    assert actions(desired(SERVED, second), half, memory) == [("Verify", "trl-policy-v2")]
