"""`policyline demo` on two real vLLM servers."""

import json

import pytest

from tests.acceptance.conftest import Command
from tests.acceptance.test_demo_sim import CHECKS, read_until


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_demo_on_real_vllm_holds_every_invariant(command: Command) -> None:
    process = command.start("demo", "--json")
    out, err = process.communicate(timeout=580)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["engine"] == "vllm"
    assert [check["name"] for check in found["checks"]] == CHECKS
    assert all(check["ok"] for check in found["checks"])
    assert len(found["versions"]) == 12
    assert command.left() == []


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_an_interrupt_while_vllm_starts_leaves_nothing(command: Command) -> None:
    process = command.start("demo")
    read_until(process, "starting 2 engines")
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 128 + 15
    assert command.left() == []
