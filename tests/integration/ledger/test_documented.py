"""docs/ledger.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from tests.integration.ledger.test_queries import live, rollout
from tests.ledger_builders import LINE

DOCUMENT = Path(__file__).parents[3] / "docs" / "ledger.md"


def test_the_ledger_from_python(
    ledger_url: str, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    live(ledger, 6)
    ledger.record_rollouts(LINE, "b1", [rollout(1, 6), rollout(2, 3)])
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(block, str(DOCUMENT), "exec"), {"url": ledger_url})
    printed = capsys.readouterr().out
    assert printed.startswith("6 None ('r0', 'r1')\n")
    assert "version acked: trl-policy-v6 on r1" in printed
