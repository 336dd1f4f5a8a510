"""What is odd about a probe and yet no reason to withhold an ack."""

from __future__ import annotations

import pytest

from policyline.ledger.probe import TRAINER_REFERENCE, ZERO_INIT
from policyline.watcher.core.probe_notes import notes_on

BASE = (-1.0, -2.0, -3.0)
CHANGED = (-1.1, -2.0, -3.0)


def test_a_probe_that_equals_the_base_is_inconclusive() -> None:
    (note,) = notes_on(BASE, BASE, {}, tolerance=0.1)

    assert note.startswith("inconclusive")


def test_it_is_right_where_nothing_shall_change_or_no_base_is_known() -> None:
    assert notes_on(BASE, BASE, {ZERO_INIT: True}, tolerance=0.1) == ()
    assert notes_on(CHANGED, BASE, {}, tolerance=0.1) == ()
    assert notes_on(BASE, None, {}, tolerance=0.1) == ()


def test_the_trainers_reference_is_compared_by_its_mean() -> None:
    near, far = [-1.2, -2.0, -3.0], [-2.0, -3.0, -4.0]

    assert notes_on(CHANGED, BASE, {TRAINER_REFERENCE: near}, tolerance=0.1) == ()
    (note,) = notes_on(CHANGED, BASE, {TRAINER_REFERENCE: far}, tolerance=0.1)
    assert "by 0.967 on average, tolerated are 0.1" in note


@pytest.mark.parametrize("reference", ["x", [], [-1.0], ["a", "b", "c"], {"a": 1}])
def test_a_reference_that_does_not_fit_is_noted_and_harms_nothing(reference: object) -> None:
    (note,) = notes_on(CHANGED, BASE, {TRAINER_REFERENCE: reference}, tolerance=0.1)

    assert "differs from the trainer's reference by inf" in note
