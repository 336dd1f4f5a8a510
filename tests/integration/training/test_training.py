"""TRL's trainer over policyline against doubles: what it leaves in the ledger."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from policyline.cli.ledger.show import PHASES
from policyline.engines.child import free_port
from policyline.ledger.events import VERSION_EVICTED
from policyline.ledger.names import DEFAULT_LINE
from policyline.publisher import Publisher
from policyline.storage import open_storage
from tests.integration.training.stage import Stage, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS = 60 if os.environ.get("POLICYLINE_SIMULATION") == "soak" else 20


def test_steps_on_two_servers(stage: Stage) -> None:
    stage.serve("r0", "r1")
    servers = [f"{name}={engine.url}" for name, engine in stage.engines.items()]
    trainer = stage.trainer(
        "grpo", "--steps", str(STEPS), "--server", servers[0], "--server", servers[1]
    )
    trainer.succeed()

    versions = stage.published()
    assert versions == sorted(set(versions))
    assert len(versions) >= STEPS // 2  # one that waited may have been replaced
    steps = [stage.metadata(v)["step"] for v in versions]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-1] == STEPS

    last = stage.metadata(versions[-1])
    for key in ("learning_rate", "loss", "reward", "ratio", "kl", "staleness_mean", "grad_norm"):
        assert isinstance(last[key], float), key
    assert last["parent_version"] == versions[-2]
    assert set(last["phases"]) == {"train_step", "gather", "save"}
    assert len(last["probe_reference"]) == 15
    assert stage.metadata(versions[0])["zero_init"]
    assert not last["zero_init"]
    # hash-made answers have nothing to do with the trainer's model: the ratio shows it
    assert any("flag" in stage.metadata(v) for v in versions)

    consumed = {int(n) for v in versions for n in stage.metadata(v).get("samples", {})}
    assert consumed <= set(versions)
    assert consumed
    recorded = {p.phase for p in stage.ledger.phases(line=DEFAULT_LINE) if p.source == "publisher"}
    assert recorded == set(PHASES[:7])

    asked = [stage.asked(replica) for replica in ("r0", "r1")]
    assert all(a["/v1/completions"] > len(versions) for a in asked)
    assert all("/pause" not in a for a in asked)
    # the sidecars' own: one for each version, and one that fails on purpose before they join
    assert all(a["/v1/load_lora_adapter"] <= len(versions) + 1 for a in asked)
    assert "rollout/vllm_retry_total" not in trainer.log  # no request named what was not served
    assert stage.ledger.view(DEFAULT_LINE).current == versions[-1]


def test_killed_and_resumed(stage: Stage) -> None:
    stage.serve("r0")
    trainer = stage.trainer("grpo", "--steps", "500", "--save-steps", "2")
    after = random.randrange(4, 8)
    until(lambda: len(stage.published()) > after or trainer.ended())
    trainer.kill()
    before = stage.published()
    until(lambda: _answering(stage, _desired(stage)) == _desired(stage))
    window, killed_at = _desired(stage), stage.ledger.head()[0]
    checkpoint = max(
        (stage.root / "out").glob("checkpoint-*/trainer_state.json"),
        key=lambda p: int(p.parent.name.rpartition("-")[2]),
    ).parent
    step = int(checkpoint.name.rpartition("-")[2])

    served = stage.asked("r0")
    resumed = stage.trainer("grpo", "--steps", str(step + 4), "--resume", str(checkpoint))
    while True:
        answering = _answering(stage, window)
        if len(stage.published()) > len(before) or resumed.ended():
            break
        assert answering == window  # also while there is no trainer, and while it starts
    resumed.succeed()
    newer = stage.ledger.version(DEFAULT_LINE, stage.published()[len(before)])
    evicted = {
        event.version: event.seq
        for event in stage.ledger.events(after=killed_at)
        if event.kind == VERSION_EVICTED and event.version in window
    }
    assert all(seq > (newer.published_seq or 0) for seq in evicted.values())
    assert _answering(stage, _desired(stage)) == _desired(stage)
    assert stage.asked("r0")["/v1/completions"] > served["/v1/completions"]

    versions = stage.published()
    assert versions[: len(before)] == before
    assert versions == sorted(set(versions))
    first = stage.metadata(versions[len(before)])
    assert first["checkpoint_step"] == step
    assert first["parent_version"] in before
    assert first["step"] == step
    epochs = [r.epoch for r in stage.ledger.versions(line=DEFAULT_LINE)]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 2


def _desired(stage: Stage) -> set[int]:
    return {d.version for d in stage.ledger.view(DEFAULT_LINE).desired}


def _answering(stage: Stage, versions: set[int]) -> set[int]:
    """Those of the versions by which r0 answers a rollout."""
    return {version for version in versions if stage.answers("r0", version)}


def test_a_trainer_that_wakes_after_its_replacement_is_fenced(
    stage: Stage, adapters: tuple[Path, ...]
) -> None:
    stage.serve("r0")
    trainer = stage.trainer("grpo", "--steps", "500")
    until(lambda: len(stage.published()) > 2 or trainer.ended())
    trainer.signal(signal.SIGSTOP)
    before = {r.version: r.digest for r in stage.ledger.versions(line=DEFAULT_LINE)}
    with Publisher(
        stage.ledger, open_storage(str(stage.storage)), run="grpo", take_over=True
    ) as publisher:
        ours = publisher.publish(adapters[0])
    trainer.signal(signal.SIGCONT)

    assert trainer.wait() != 0
    assert "StaleEpoch" in trainer.log
    after = {r.version: r.digest for r in stage.ledger.versions(line=DEFAULT_LINE)}
    assert {v: d for v, d in after.items() if before.get(v)} == {
        v: d for v, d in before.items() if d
    }
    assert after[ours.version] == ours.digest
    assert stage.published()[-1] == ours.version


def test_a_fork_records_its_parent(stage: Stage) -> None:
    stage.serve("r0")
    stage.trainer("first", "--steps", "2", "--save-steps", "2").succeed()
    before = stage.published()
    checkpoint = str(stage.root / "out" / "checkpoint-2")
    fork = ("--resume", checkpoint, "--parent-run", "first", "--steps", "4")
    stage.trainer("second", *fork).succeed()

    run = stage.ledger.run("second")
    assert run.parent_run == "first"
    assert run.parent_version in before
    assert stage.ledger.run("first").state == "closed"
    assert set(stage.published()) > set(before)
    assert min(set(stage.published()) - set(before)) > max(before)


def test_storage_that_disappears_blocks_publishing_and_then_stops(stage: Stage) -> None:
    stage.serve("r0")
    trainer = stage.trainer("grpo", "--steps", "500", "--ready-timeout", "6")
    until(lambda: len(stage.published()) > 2 or trainer.ended())
    away = stage.root / "away"
    stage.storage.rename(away)

    assert trainer.wait() != 0
    assert "publishing is blocked" in trainer.log
    assert "PublishingBlocked" in trainer.log
    away.rename(stage.storage)
    for version in stage.published():
        assert (stage.storage / f"{DEFAULT_LINE}-v{version}").is_dir()


def test_without_a_replica_training_stops_with_the_reason(stage: Stage) -> None:
    stage.engine("r0")
    trainer = stage.trainer("grpo", "--steps", "5", "--ready-timeout", "4")
    assert trainer.wait() != 0
    assert "NothingReady" in trainer.log
    assert "no replica has joined the line" in trainer.log


def test_a_name_that_another_ledger_has_loaded_is_the_reason(
    stage: Stage, adapters: tuple[Path, ...]
) -> None:
    stage.serve("r0")
    stage.load("r0", f"{DEFAULT_LINE}-v1", adapters[0])
    trainer = stage.trainer("grpo", "--steps", "5", "--ready-timeout", "6")
    assert trainer.wait() != 0
    assert f"r0: its vLLM serves {str(adapters[0])!r} under that name" in trainer.log
    assert "--take-over" in trainer.log


def test_two_processes_train_and_stop_together(stage: Stage, adapters: tuple[Path, ...]) -> None:
    stage.serve("r0")
    port = str(free_port())
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    launcher.append("--")  # else --run is taken for one of its own options
    trainer = stage.trainer("grpo", "--steps", "500", launcher=tuple(launcher))
    until(lambda: len(stage.published()) > 2 or trainer.ended())
    assert not trainer.ended(), trainer.log[-3000:]
    with Publisher(
        stage.ledger, open_storage(str(stage.storage)), run="grpo", take_over=True
    ) as publisher:
        publisher.publish(adapters[0])

    assert trainer.wait() != 0
    assert "StaleEpoch" in trainer.log  # rank 0
    assert "OtherRankFailed" in trainer.log  # rank 1, stopped instead of left waiting
