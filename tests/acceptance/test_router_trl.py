"""Stock TRL trains through the router against two real vLLM servers; then again from scratch.

`POLICYLINE_TRL_STEPS` sets the steps of each; `make soak` takes twenty.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from policyline.demo.settings import DemoSettings
from policyline.engines.child import ChildServer
from policyline.engines.vllm import VllmServer
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.manifest import Manifest
from policyline.ledger.rollouts import RolloutFilter
from tests.acceptance.conftest import FleetOn
from tests.engines import until

STEPS = int(os.environ.get("POLICYLINE_TRL_STEPS", "5"))
STARTS = 2
"""The second from scratch: it uses the first one's names again."""
RUN = "stock"
SCRIPT = Path(__file__).with_name("stock_trl.py")


def router_child(settings: DemoSettings) -> ChildServer:
    command = [sys.executable, "-m", "policyline", "router", "--listen", "127.0.0.1:{port}"]
    command += ["--ledger", str(settings.ledger), "--storage", str(settings.storage)]
    command += ["--spool", str(settings.workdir / "spool")]
    return ChildServer(command, log_path=settings.logs / "router.log")


def train(settings: DemoSettings, model: Path, url: str, steps: int) -> None:
    output = settings.workdir / "out"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, str(SCRIPT), str(model), str(output), url, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def check(settings: DemoSettings, ledger: Ledger, *starts: int) -> None:
    """Each sync is a version, and each rollout was answered by the version its name meant."""
    versions = [v for v in ledger.versions(run=RUN) if v.digest]
    names = [Manifest.from_text(v.manifest or "").metadata["trainer_name"] for v in versions]
    numbers = [int(name.rpartition("-v")[2]) for name in names]
    begun = [index for index, number in enumerate(numbers) if number == 1]
    assert len(begun) == len(starts)
    for steps, first, end in zip(starts, begun, [*begun[1:], len(numbers)], strict=True):
        assert numbers[first:end] == list(range(1, end - first + 1))
        assert end - first >= steps
    assert not [v for v in versions if v.state not in {"published", "skipped"}]
    rows = list(ledger.rollouts(RolloutFilter(line=settings.line)))
    called = {v.version: name for v, name in zip(versions, names, strict=True)}
    assert {row.status for row in rows} <= {200, 499}
    assert {(r.version, r.asked_name) for r in rows} <= set(called.items())
    assert {row.replica for row in rows} == set(settings.replica_names)
    assert len({row.version for row in rows}) >= sum(starts) // 2
    assert len({row.request for row in rows}) == len(rows)


async def until_shipped(settings: DemoSettings) -> None:
    """Wait until the ledger has every rollout: no file is left in the spool."""

    async def empty() -> bool:
        spool = settings.workdir / "spool"
        return not [*spool.glob("*.open"), *spool.glob("*.jsonl")]

    await until(empty, 60)


@pytest.mark.engine
@pytest.mark.timeout(1700)
async def test_stock_trl_trains_through_the_router(
    tmp_path: Path, tiny_base: Path, vllm_servers: list[VllmServer]
) -> None:
    settings = DemoSettings(workdir=tmp_path, run=RUN)
    settings.storage.mkdir()
    upgrade_url(str(settings.ledger))
    with FleetOn(settings, vllm_servers) as fleet, Ledger(str(settings.ledger)) as ledger:
        fleet.start_engines()
        async with AsyncExitStack() as stack:
            await fleet.wait_engines(stack)
            await fleet.start_sidecars(ledger)
            with router_child(settings) as router:
                done: list[int] = []
                for _ in range(STARTS):
                    train(settings, tiny_base, f"{router.url}/t/{RUN}", STEPS)
                    done.append(STEPS)
                    await until_shipped(settings)
                    check(settings, ledger, *done)
                assert router.terminate(30) == 0
