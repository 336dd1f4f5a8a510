"""What one append remembers for the next is never taken for true when somebody else appended."""

from __future__ import annotations

import pytest

from policyline.ledger import Ledger
from policyline.ledger.errors import NotFound, Refused, StaleEpoch, StaleGeneration
from policyline.ledger.read.verify import verify
from tests.behind_the_back import run_sql
from tests.ledger_builders import FACTS, LINE, publish


def test_who_finds_nothing_to_do_has_looked_again(ledger_url: str) -> None:
    with Ledger(ledger_url) as one, Ledger(ledger_url) as two:
        claim = one.open_run("r1")
        publish(one, claim, "a")
        for _ in range(20):  # more than a miss silences
            assert one.pause(LINE, "because")
            assert two.resume(LINE)
        assert verify(one).problems == ()


def test_a_refusal_has_looked_again(ledger_url: str) -> None:
    with Ledger(ledger_url) as one, Ledger(ledger_url) as two:
        claim = one.open_run("r1")
        for number in range(1, 12):
            with pytest.raises((NotFound, Refused)):
                one.pin(LINE, number, serve=False)
            one.pause(LINE, "remember this")
            publish(two, claim, f"a{number}")
            one.pin(LINE, number, serve=False)
        assert verify(one).problems == ()


def test_the_fenced_are_fenced_whatever_they_remember(ledger_url: str) -> None:
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


def test_appends_of_one_process_read_nothing_twice(postgres_url: str) -> None:
    """The second says what it says without asking: a row changed behind its back shows that."""
    with Ledger(postgres_url) as ledger:
        ledger.open_run("r1")
        member = ledger.join(LINE, "r0", FACTS)
        ledger.fetched(member, 1, "d" * 64)
        run_sql(postgres_url, "UPDATE residency SET failures = 7")
        ledger.fetched(member, 1, "d" * 64)
        assert ledger.view(LINE, also=[1]).residency == {}
        assert [row.failures for row in ledger.residency(LINE)] == [0]
