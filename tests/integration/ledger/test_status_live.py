"""`policyline ledger status --watch`: the fleet as it moves, and whose heartbeat stands still."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from policyline.ledger import Ledger
from tests.ledger_builders import FACTS, LINE, acknowledge, publish


@pytest.mark.timeout(60)
def test_it_shows_each_change_and_who_has_gone_silent(ledger: Ledger, ledger_url: str) -> None:
    claim = ledger.open_run("r1")
    member = ledger.join(LINE, "alone", FACTS)
    command = [sys.executable, "-m", "policyline", "ledger", "status", "--watch", "--json"]
    with subprocess.Popen(
        [*command, "--ledger", ledger_url, "--line", LINE], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        shown = json.loads(process.stdout.readline())
        assert (shown["current"], shown["silent_s"]) == (None, {})

        acknowledge(ledger, member, publish(ledger, claim))
        while shown["current"] is None:
            shown = json.loads(process.stdout.readline())
        # Nobody else is there who could declare it lost: its acks stand, but it is seen.
        while not shown["silent_s"]:
            shown = json.loads(process.stdout.readline())
        assert shown["silent_s"]["alone"] >= 10
        assert shown["replicas"][0]["state"] == "joined"

        ledger.beat(member, 1)
        while shown["silent_s"]:
            shown = json.loads(process.stdout.readline())

        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
