"""What is logged once, and what is logged again."""

from __future__ import annotations

import pytest

from policyline.watcher.core.model import Pending
from policyline.watcher.metrics import SidecarMetrics
from policyline.watcher.transition_log import ENGINE_READ, TransitionLog

FULL = Pending("trl-policy-v1", "back_off", "StorageFull: 4 MiB free")
SLOT = Pending("trl-policy-v1", "no_slot", "has no slot")


def test_another_kind_of_cause_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    transitions = TransitionLog(SidecarMetrics())

    transitions.failed(ENGINE_READ, "EngineUnreachable: refused")
    transitions.failed(ENGINE_READ, "EngineUnreachable: reset")
    transitions.failed(ENGINE_READ, "EngineUnauthorized: the key")
    transitions.failed(ENGINE_READ, "EngineUnauthorized: the key")
    transitions.recovered(ENGINE_READ)
    transitions.failed(ENGINE_READ, "EngineUnauthorized: the key")

    logged = [record.getMessage() for record in caplog.records]
    assert logged == [
        "engine unreachable: EngineUnreachable: refused",
        "engine unreachable: EngineUnauthorized: the key",
        "engine unreachable: EngineUnauthorized: the key",
    ]


def test_a_version_that_is_tried_in_between_is_not_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transitions, unserved = TransitionLog(SidecarMetrics()), {"trl-policy-v1"}

    for pending in ([FULL], [], [FULL], [SLOT], []):
        transitions.pending(pending, unserved)
    transitions.pending([], ())
    transitions.pending([FULL], unserved)

    logged = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[2] for text in logged] == [FULL.why, SLOT.why, FULL.why]
