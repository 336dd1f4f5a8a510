"""Chaos behind the router: nothing wrong is answered, nothing is lost, nothing is doubled.

`POLICYLINE_CHAOS_ROUNDS` sets how many versions are published; `make soak` takes many.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from policyline.demo.fleet import Fleet
from policyline.demo.settings import DemoSettings, EngineKind
from policyline.engines.vllm import VllmServer
from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.rollouts import RolloutFilter
from tests.acceptance.chaos import Chaos, Seen, slow_sidecar, slow_storage
from tests.acceptance.conftest import FleetOn
from tests.engines import until

ROUNDS = int(os.environ.get("POLICYLINE_CHAOS_ROUNDS", "8"))
_BACK_WITHIN_S = 180.0
"""An engine that was killed last starts for a minute on a busy machine."""


@pytest.mark.timeout(120 + 20 * ROUNDS)
async def test_chaos_on_doubles(tmp_path: Path) -> None:
    settings = DemoSettings(workdir=tmp_path, run="chaos", engine=EngineKind.SIM, replicas=3)
    await _chaos(Fleet(settings))


@pytest.mark.engine
@pytest.mark.timeout(600 + 60 * ROUNDS)
async def test_chaos_on_real_engines(tmp_path: Path, vllm_servers: list[VllmServer]) -> None:
    settings = DemoSettings(workdir=tmp_path, run="chaos", replicas=2)
    await _chaos(FleetOn(settings, vllm_servers))


async def _chaos(fleet: Fleet) -> None:
    settings = fleet.settings
    settings.storage.mkdir()
    slow_storage(settings).mkdir()
    upgrade_url(str(settings.ledger))
    with fleet, Ledger(str(settings.ledger)) as ledger:
        fleet.start_engines()
        async with AsyncExitStack() as stack:
            await fleet.wait_engines(stack)
        await fleet.start_sidecars(ledger)
        await _slow_down_the_last(settings, fleet)
        chaos = Chaos(settings, fleet, ledger)
        with chaos.router:

            async def storm(number: int) -> None:
                match number % 4:
                    case 0 if await chaos.serves("r0"):  # else it is still on its way back
                        # its engine dies and is started again, as by a supervisor
                        await asyncio.to_thread(fleet.engines["r0"].restart)
                    case 1:
                        await asyncio.to_thread(fleet.sidecars["r1"].restart)
                    case 2:
                        await chaos.kill_router()
                    case _:
                        pass

            seen = await chaos.run(ROUNDS, storm)
        await until(chaos.all_serve, _BACK_WITHIN_S)
        _judge(settings, ledger, seen)


async def _slow_down_the_last(settings: DemoSettings, fleet: Fleet) -> None:
    replica = settings.replica_names[-1]
    await asyncio.to_thread(fleet.sidecars[replica].stop)
    slow = slow_sidecar(settings, replica, fleet.engines[replica].url)
    fleet.sidecars[replica] = slow
    slow.start()


def _judge(settings: DemoSettings, ledger: Ledger, seen: Seen) -> None:
    assert seen.errors == []
    assert len(seen.scores) >= ROUNDS
    mixed = {v: scores for v, scores in seen.scores.items() if len(scores) != 1}
    assert mixed == {}, "one version answers one question in one way"
    answers = [scores for (scores,) in seen.scores.values()]
    assert len(set(answers)) == len(answers), "and no other version does"
    recorded = Counter(r.request for r in ledger.rollouts(RolloutFilter(line=settings.line)))
    assert set(seen.requests) <= set(recorded), "no answer is lost"
    assert set(recorded.values()) == {1}, "none is doubled"
    assert len(set(seen.requests)) == len(seen.requests) > 20 * ROUNDS
    assert len(recorded) <= len(seen.requests) + seen.cut
    assert seen.replicas == set(settings.replica_names)
