"""Events: the hash covers every column."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from policyline.ledger.events import GENESIS_HASH, Event, NewEvent, event_hash, seal

NEW = NewEvent(
    kind="version_acked",
    line="trl-policy",
    run="r1",
    key="k",
    actor="a",
    payload={"b": 1, "a": "x"},
    version=7,
    replica="r0",
    epoch=2,
    generation=3,
)
SEALED = seal(NEW, seq=5, recorded_at="2026-01-01T00:00:00.000000+00:00", prev_hash=GENESIS_HASH)


def test_a_sealed_event_carries_its_own_hash() -> None:
    assert SEALED.hash == event_hash(SEALED)
    assert SEALED.data == {"a": "x", "b": 1, "schema": 1}


CHANGES: dict[str, Any] = {
    "seq": 6,
    "line": "x",
    "run": "x",
    "kind": "x",
    "version": None,
    "replica": None,
    "actor": "x",
    "epoch": None,
    "generation": None,
    "key": "x",
    "payload": "{}",
    "recorded_at": "x",
    "prev_hash": "x",
}


def test_every_column_is_tried() -> None:
    assert CHANGES.keys() | {"hash"} == set(Event.__slots__)


@pytest.mark.parametrize("column", CHANGES)
def test_changing_any_column_changes_the_hash(column: str) -> None:
    changed = dataclasses.replace(SEALED, **{column: CHANGES[column]})
    assert event_hash(changed) != SEALED.hash


def test_a_retry_says_the_same_whoever_sends_it() -> None:
    assert SEALED.is_the_same_fact(dataclasses.replace(NEW, actor="other"))
    assert not SEALED.is_the_same_fact(dataclasses.replace(NEW, payload={"a": "y", "b": 1}))
    assert not SEALED.is_the_same_fact(dataclasses.replace(NEW, version=8))
