"""Rollouts on the local disk, and their upload: nothing lost, nothing doubled."""

from __future__ import annotations

import logging
import os
import resource
import signal
from pathlib import Path

import pytest

from policyline.ledger.rollouts import HASHED_FIELDS, NewRollout
from policyline.router import RouterSettings
from policyline.router.errors import SpoolUnusable
from policyline.router.rollouts.spool import MAX_ROWS, Spool
from policyline.router.rollouts.uploader import Uploader
from tests.integration.router.site import Site


def rollout(number: int) -> NewRollout:
    return NewRollout(
        request=f"request-{number}",
        run="run",
        version=1,
        replica="r0",
        asked_name="trl-policy-v1",
        status=200,
        started_at="2026-01-01T00:00:00.000000+00:00",
        episode='strange "episode" \u2028 \ud800'.encode(errors="replace").decode(),
    )


def values(number: int) -> list[object]:
    return [getattr(rollout(number), name) for name in HASHED_FIELDS]


def test_rollouts_survive_a_kill(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        spool = Spool(tmp_path)
        for number in range(7):
            spool.append(values(number))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)

    spool = Spool(tmp_path)
    (batch,) = spool.sealed()

    assert spool.read(batch) == [rollout(n) for n in range(7)]
    spool.close()


def test_a_torn_line_is_skipped_at_every_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(values(1))
    spool.seal()
    (batch,) = spool.sealed()
    with (tmp_path / f"{batch}.jsonl").open("ab") as file:
        file.write(b'["request-2", "ru')

    assert spool.read(batch) == spool.read(batch) == [rollout(1)]
    spool.close()


def test_files_stay_small_and_go_when_they_are_recorded(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(MAX_ROWS + 1):
        spool.append(values(number))
    spool.seal()

    batches = spool.sealed()
    assert [len(spool.read(b)) for b in batches] == [MAX_ROWS, 1]
    for batch in batches:
        spool.remove(batch)
        spool.remove(batch)
    assert spool.sealed() == []
    spool.close()
    spool.close()


def test_a_spool_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(SpoolUnusable, match="--spool"):
        Spool(tmp_path / "file")


def test_a_rollout_on_a_full_disk_is_not_recorded(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append(values(1))
    (file,) = tmp_path.glob("*.open")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(SpoolUnusable, match="the disk is full"):
            spool.append(values(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    spool.append(values(3))
    spool.close()

    spool = Spool(tmp_path)
    assert [spool.read(batch) for batch in spool.sealed()] == [[rollout(1)], [rollout(3)]]
    spool.close()


async def test_a_batch_that_the_ledger_refuses_does_not_block_the_next(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    await site.add("r0")
    await site.publish_and_serve(1)
    spool = Spool(site.root / "spool")
    spool.append(values(1))
    spool.seal()
    (refused,) = spool.sealed()
    site.ledger.record_rollouts("trl-policy", refused, [rollout(2)])  # the key is in use
    spool.append(values(3))
    uploader = Uploader(RouterSettings(), site.ledger, spool)

    await uploader.upload()

    assert (uploader.uploaded, uploader.waiting) == (1, 0)
    assert [row.request for row in site.rollouts()] == ["request-2", "request-3"]
    assert (site.root / "spool" / f"{refused}.refused").exists()
    assert spool.sealed() == []
    events = [getattr(r, "event", "") for r in caplog.records if r.levelno == logging.ERROR]
    assert events == ["rollouts_refused"]
    spool.close()
