"""I5: kill -9 at any instant, then a restart: published once, or swept. Nothing half-visible."""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.publisher import Publisher
from tests.integration.publisher.dying import DONE, open_dying, publish_dying
from tests.integration.publisher.workspace import (
    RUN,
    Workspace,
    check_at_rest,
    make_workspace,
    versions,
)

pytestmark = pytest.mark.timeout(300)

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.integration.publisher.dying"])


def run_to_death(
    target: Callable[[Workspace, int], None], workspace: Workspace, kill_before: int
) -> bool:
    """Run it in a process of its own; returns whether it got to the end before it was killed."""
    child = _FORKS.Process(target=target, args=(workspace, kill_before))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    return workspace.root.with_name(DONE).exists()


def restart_and_check(workspace: Workspace, *, returned: bool) -> str:
    """A new publisher opens without take-over, and everything is at rest; then it goes on.

    Returns:
        What became of the version: "published", "rejected" or "" when no number was reserved.
    """
    with Ledger(workspace.ledger) as ledger:
        with Publisher(ledger, workspace.storage, run=RUN) as publisher:
            check_at_rest(ledger, workspace.root)
            rows = versions(ledger)
            assert set(rows) <= {1}
            became = rows[1].state if rows else ""
            assert became in {"published", "rejected", ""}
            if returned:
                assert became == "published"
            assert not (workspace.root / ".quarantine").exists()
            following = publisher.publish(workspace.adapter)
            assert following.version == len(rows) + 1
        check_at_rest(ledger, workspace.root)
    return became


def test_killed_before_each_effect_of_publishing(tmp_path: Path) -> None:
    outcomes = []
    for kill_before in itertools.count(1):
        workspace = make_workspace(tmp_path / str(kill_before))
        returned = run_to_death(publish_dying, workspace, kill_before)
        outcomes.append(restart_and_check(workspace, returned=returned))
        shutil.rmtree(tmp_path / str(kill_before))
        if returned:
            break
    # first no number, then a hole, then published: each instant was tried, in this order
    assert [outcome for outcome, _ in itertools.groupby(outcomes)] == ["", "rejected", "published"]
    assert len(outcomes) > 40


def is_staged_whole(workspace: Workspace) -> bool:
    return any(path.name == "manifest.json" for path in workspace.root.glob(".staging*/*"))


def is_renamed(workspace: Workspace) -> bool:
    return (workspace.root / "trl-policy-v1").exists()


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a publisher leaves that dies as soon as its files are staged, or are renamed."""
    found: dict[str, Path] = {}
    for kill_before in itertools.count(1):
        workspace = make_workspace(tmp_path_factory.mktemp("dead") / "all")
        assert not run_to_death(publish_dying, workspace, kill_before)
        if is_staged_whole(workspace):
            found.setdefault("staged", workspace.root.parent)
        if is_renamed(workspace):
            found["renamed"] = workspace.root.parent
            return found
    raise AssertionError


@pytest.mark.parametrize(
    ("left_behind", "becomes"), [("staged", "rejected"), ("renamed", "published")]
)
def test_killed_before_each_effect_of_sweeping(
    tmp_path: Path, dead: dict[str, Path], left_behind: str, becomes: str
) -> None:
    for kill_before in itertools.count(1):
        here = tmp_path / str(kill_before)
        shutil.copytree(dead[left_behind], here)
        workspace = Workspace(str(here / "ledger.db"), here / "storage", here / "adapter")
        ended = run_to_death(open_dying, workspace, kill_before)
        assert restart_and_check(workspace, returned=False) == becomes
        shutil.rmtree(here)
        if ended:
            assert kill_before > 5
            return
