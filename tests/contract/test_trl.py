"""What publisher.trl relies on of TRL's private parts, against every release it supports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest

from policyline.publisher.errors import NotSupported

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RELEASES = ("1.14.0", "1.14.1", "1.14.2", "1.15.0", "1.16.0")
WITHIN_S = 400.0


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A release and the path that makes Python import it."""
    wanted: str = request.param
    if wanted == installed_version("trl"):
        return wanted, str(ROOT)
    cache = request.config.cache
    assert cache is not None
    unpacked = cache.mkdir("trl") / wanted
    if not unpacked.exists():
        _download(wanted, cache.mkdir("trl-wheels"), unpacked)
    return wanted, f"{unpacked}{os.pathsep}{ROOT}"


def _download(wanted: str, wheels: Path, unpacked: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(wheels)]
    done = subprocess.run([*command, f"trl=={wanted}"], capture_output=True, check=False)
    if done.returncode:
        if os.environ.get("CI"):
            pytest.fail(f"TRL {wanted} could not be downloaded: {done.stderr.decode()[-300:]}")
        pytest.skip(f"TRL {wanted} is not installed, and there is no package index")
    (wheel,) = wheels.glob(f"trl-{wanted}-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(unpacked)


def test_a_release_does_what_is_relied_on(release: tuple[str, str], tiny_base: Path) -> None:
    wanted, path = release
    seen = _exercise(path, tiny_base)
    assert seen["version"] == wanted
    # one sync before the worker starts, one after each step and before its log
    assert seen["syncs"] == [0, 1, 2]
    assert seen["started_after"] == 1
    assert seen["should_log"] == [False, True, True]
    assert [line[:2] for line in seen["logged"]] == [[1, 2], [2, 3]]
    for key in ("loss", "learning_rate", "grad_norm", "ratio", "kl", "reward"):
        assert all(key in line[2] for line in seen["logged"]), key
    # samples come through the queue that was put in place, and old ones are dropped by version
    assert 1 in seen["consumed"]
    assert "sample/dropped_stale_total" in seen["logged"][0][2]
    assert "sample/staleness_mean" in seen["logged"][0][2]
    # the worker's child runs our loop with our arguments; the version goes through one number
    assert seen["loop_cls"] == "PolicyRolloutLoop"
    assert {"lora_name", "endpoints", "dataset_start_index"} <= set(seen["loop_kwargs"])
    assert seen["stamped"] == 8
    assert seen["waits_while_unserved"]
    assert seen["asked"] == ["http://nowhere/v1/completions", "line-v9"]
    assert seen["turn"] == [[3], [-1.0]]


def _exercise(path: str, model: Path) -> dict[str, Any]:
    program = Path(__file__).with_name("trl_release.py")
    done = subprocess.run(
        [sys.executable, str(program), str(model)],
        env={**os.environ, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    seen: dict[str, Any] = json.loads(line.removeprefix("SEEN "))
    return seen


@pytest.mark.parametrize("found", ["1.13.0", "1.17.0", "2.0.0", "unknown"])
@pytest.mark.filterwarnings("ignore")  # TRL's, at its import
def test_another_release_is_refused_with_the_remedy(found: str) -> None:
    from policyline.publisher.training.trl_private import require_supported  # noqa: PLC0415 - imports TRL

    with pytest.raises(NotSupported, match=rf"TRL {found} is installed.*1\.14 to 1\.16.*pip inst"):
        require_supported(found)


@pytest.mark.filterwarnings("ignore")  # as above
def test_only_what_is_meant_to_be_is_overridden() -> None:
    from policyline.publisher.training.trl_private import TrlTrainer  # noqa: PLC0415 - as above
    from policyline.publisher.trl import AsyncGRPOTrainer  # noqa: PLC0415 - as above

    ours = {name for name in vars(AsyncGRPOTrainer) if not name.startswith("__")}
    assert ours & set(dir(TrlTrainer)) == {"_inner_training_loop", "_sync_weight", "log"}
