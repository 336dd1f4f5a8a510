"""The quick starts of README.md, followed word for word, on the double and on real vLLM."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from policyline.demo.synthetic import write_adapter
from policyline.engines.child import free_port
from policyline.ledger import Ledger
from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.rollouts import RolloutFilter
from tests.shell import ROOT, Shell

BESIDE, ROUTER = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SMALL = "--max-model-len 256 --max-num-seqs 16 --enforce-eager --served-model-name tiny "
DOUBLE = f"""\
#!{sys.executable}
import sys
from policyline.engines.simulated.__main__ import main
command, *arguments = sys.argv[1:]
assert command == "serve"
arguments.remove("--enable-lora")
host = arguments.index("--host")
del arguments[host : host + 2]
sys.exit(main(arguments))
"""
"""`vllm serve`, by the double, which knows neither of these two options."""
WITHIN_S = 300.0


def test_on_the_double(tmp_path: Path) -> None:
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(DOUBLE)
    vllm.chmod(0o755)
    follow(tmp_path, BESIDE, model="tiny")


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_on_vllm(tmp_path: Path, tiny_base: Path) -> None:
    follow(tmp_path, BESIDE.replace("--enable-lora", f"{SMALL}--enable-lora"), model=str(tiny_base))


def follow(directory: Path, beside: str, *, model: str) -> None:
    """Run both blocks; what they install is what these tests run in."""
    write_adapter(directory / "my-adapter", 1)
    install, beside = beside.split("\n", 1)
    assert install == "pip install ."
    ports = {"8000": str(free_port()), "8080": str(free_port())}
    here = {"POLICYLINE_LISTEN": "127.0.0.1:0", "XDG_CACHE_HOME": str(directory / "xdg")}
    shell = Shell(directory, MODEL=model, **here)
    ledger = directory / "run.db"
    try:
        status = shell.run(on(ports, beside))
        assert "my-run" in status
        until_current(ledger, shell)
        shown = shell.run(on(ports, ROUTER))
        answer = json.loads(re.findall(r"^\{.*", shown, re.MULTILINE)[0])
        assert answer["model"] == "trl-policy-v1"
        until_recorded(ledger)
    finally:
        shell.stop()


def on(ports: dict[str, str], text: str) -> str:
    for written, free in ports.items():
        text = text.replace(written, free)
    return text


def until_current(path: Path, shell: Shell) -> None:
    deadline = time.monotonic() + WITHIN_S
    with Ledger(str(path)) as ledger:
        while ledger.view(DEFAULT_LINE).current != 1:
            assert time.monotonic() < deadline, f"not current: {shell.tail()}"
            time.sleep(0.1)


def until_recorded(path: Path) -> None:
    deadline = time.monotonic() + 30
    with Ledger(str(path)) as ledger:
        while not (found := list(ledger.rollouts(RolloutFilter(version=1)))):
            assert time.monotonic() < deadline, "the answer is not recorded"
            time.sleep(0.1)
    assert [(r.status, r.staleness) for r in found] == [(200, 0)]
