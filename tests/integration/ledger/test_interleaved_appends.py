"""Two processes append in turn: each append sees what the other did last."""

from __future__ import annotations

import pytest

from policyline.ledger import Ledger
from policyline.ledger.errors import NotFound, Refused, StaleEpoch, StaleGeneration
from policyline.ledger.read.verify import verify
from tests.ledger_builders import FACTS, LINE, publish


def test_one_that_changes_nothing_has_read_the_latest_state(ledger_url: str) -> None:
    with Ledger(ledger_url) as one, Ledger(ledger_url) as two:
        claim = one.open_run("r1")
        publish(one, claim, "a")
        for _ in range(20):
            assert one.pause(LINE, "because")
            assert two.resume(LINE)
        assert verify(one).problems == ()


def test_a_refusal_is_about_the_latest_state(ledger_url: str) -> None:
    with Ledger(ledger_url) as one, Ledger(ledger_url) as two:
        claim = one.open_run("r1")
        for number in range(1, 12):
            with pytest.raises((NotFound, Refused)):
                one.pin(LINE, number, serve=False)
            one.pause(LINE, "read this row")
            publish(two, claim, f"a{number}")
            one.pin(LINE, number, serve=False)
        assert verify(one).problems == ()


def test_a_fenced_process_is_refused_though_it_has_just_appended(ledger_url: str) -> None:
    with Ledger(ledger_url, actor="one") as one, Ledger(ledger_url, actor="two") as two:
        claim = one.open_run("r1")
        member = one.join(LINE, "r0", FACTS)
        one.reserve(claim)
        two.join(LINE, "r0", FACTS)
        with pytest.raises(StaleGeneration):
            one.fetched(member, 1, "d" * 64)
        one.reserve(claim)
        two.open_run("r1", take_over=True)
        with pytest.raises(StaleEpoch, match="two"):
            one.reserve(claim)
        assert verify(one).problems == ()
