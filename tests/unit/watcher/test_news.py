"""What is told once, and what is told again."""

from __future__ import annotations

import pytest

from policyline.watcher.core.model import Held
from policyline.watcher.metrics import Metrics
from policyline.watcher.transition_log import News

FULL = Held("trl-policy-v1", "back_off", "StorageFull: 4 MiB free")
SLOT = Held("trl-policy-v1", "no_slot", "has no slot")


def test_another_kind_of_cause_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    news = News(Metrics())

    news.away("engine", "EngineUnreachable: refused")
    news.away("engine", "EngineUnreachable: reset")
    news.away("engine", "EngineUnauthorized: the key")
    news.away("engine", "EngineUnauthorized: the key")
    news.back("engine")
    news.away("engine", "EngineUnauthorized: the key")

    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "engine away: EngineUnreachable: refused",
        "engine away: EngineUnauthorized: the key",
        "engine away: EngineUnauthorized: the key",
    ]


def test_a_version_that_is_tried_in_between_has_nothing_new_to_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    news, unserved = News(Metrics()), {"trl-policy-v1"}

    for held in ([FULL], [], [FULL], [SLOT], []):
        news.held(held, unserved)
    news.held([], ())
    news.held([FULL], unserved)

    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[2] for text in told] == [FULL.why, SLOT.why, FULL.why]
