"""Training over policyline beside TRL's own sync: the importance ratio, and who generated what.

Both train on the same real vLLM servers, from the same model, with the same settings. The mean
ratio alone shows gross errors only: over samples of any policy its expectation is 1. So each sample
is also scored by the weights of every version, and must be one of the version that it names, or of
one that became current while its group was generated.
"""

from __future__ import annotations

import ast
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from policyline.demo.settings import DemoSettings
from policyline.engines.vllm import VllmServer
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.manifest import Manifest
from tests.acceptance.conftest import FleetOn
from tests.conftest import unload_all

STEPS = 60 if os.environ.get("POLICYLINE_SIMULATION") == "soak" else 20
EXACT = 0.01
"""Mean distance (natural log) of a token's score on the server, in bfloat16, from the trainer's
under the same weights; under the version before it is several times that."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _output(script: str, *arguments: str) -> str:
    """What a script beside this one prints."""
    command = [sys.executable, str(HERE / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _train(script: str, *arguments: str) -> list[float]:
    """The ratio of each step, from the trainer's own log."""
    found = re.findall(r"\{'.*?\}", _output(script, *arguments))
    logs = [ast.literal_eval(text) for text in found]
    return [float(log["ratio"]) for log in logs if "ratio" in log]


def _fits(model: str, storage: str, samples: str) -> list[tuple[int, dict[int, float]]]:
    """(version that a sample names, distance from each version's own scores) of each sample."""
    lines = _output("fits.py", model, storage, samples).splitlines()
    found = [json.loads(line) for line in lines]
    return [(f["version"], {int(v): away for v, away in f["away"].items()}) for f in found]


def _away(ratios: list[float]) -> list[float]:
    return sorted(abs(ratio - 1.0) for ratio in ratios)


@pytest.mark.engine
@pytest.mark.timeout(45 * STEPS)
async def test_the_ratio_stays_within_what_trls_own_sync_shows(
    tmp_path: Path,
    tiny_base: Path,
    vllm_servers: list[VllmServer],
    record_property: Callable[[str, object], None],
) -> None:
    settings = DemoSettings(workdir=tmp_path, run="ratio")
    settings.storage.mkdir()
    upgrade_url(str(settings.ledger))
    model, steps = str(tiny_base), str(STEPS)
    with FleetOn(settings, vllm_servers) as fleet, Ledger(str(settings.ledger)) as ledger:
        fleet.start_engines()
        async with AsyncExitStack() as stack:
            await fleet.wait_engines(stack)
            servers = {replica: engine.url for replica, engine in fleet.engines.items()}
            own = vllm_servers[0]
            stock = _train("stock_trl.py", model, str(tmp_path / "stock"), own.url, steps)
            unload_all(own)  # what TRL's own sync has left
            await fleet.start_sidecars(ledger)
            where = [str(settings.ledger), str(settings.storage), settings.run]
            pairs = [f"{replica}={url}" for replica, url in servers.items()]
            kept = str(tmp_path / "samples.jsonl")
            out = str(tmp_path / "ours")
            ours = _train("policyline_trl.py", model, out, steps, kept, *where, *pairs)
        fits = _fits(model, str(settings.storage), kept)
        versions = [v for v in ledger.versions(run=settings.run) if v.digest]

    assert len(stock) == len(ours) == STEPS
    a, b = _away(stock), _away(ours)
    for name, away in (("A", a), ("B", b)):
        record_property(name, f"median {statistics.median(away):.4f} most {away[-1]:.4f}")
        print(f"{name}: |ratio - 1| median {statistics.median(away):.4f} most {away[-1]:.4f}")
    # a step's mean ratio scatters around 1 by chance, the more the further the policy has moved:
    # medians of 0.004 and 0.0095 were seen of two runs whose samples all fit their versions
    assert statistics.median(b) <= a[-1], (stock, ours)
    assert b[-1] <= 2 * a[-1], (stock, ours)

    exact = [(named, {v for v, away in found.items() if away <= EXACT}) for named, found in fits]
    for named, found in fits:
        print(named, {v: round(away, 4) for v, away in found.items() if away < 0.05})
    assert len(exact) >= STEPS
    assert not [(named, by) for named, by in exact if not by or max(by) < named]

    consumed = {
        int(number)
        for version in versions
        for number in Manifest.from_text(version.manifest or "").metadata.get("samples", {})
    }
    assert consumed
    assert consumed <= {version.version for version in versions}
