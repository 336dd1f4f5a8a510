"""I6: one publisher at a time; one that is no longer it changes nothing and learns who is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.errors import Refused, StaleEpoch
from policyline.publisher import Publisher
from policyline.storage import DirectoryStorage, Staging, StorageError
from tests.integration.publisher.workspace import RUN, Workspace, check_at_rest, versions


@pytest.fixture
def successor(workspace: Workspace) -> Iterator[Callable[[], Publisher]]:
    """Makes another process's publisher, which takes the run over."""
    with ExitStack() as stack:

        def take_over() -> Publisher:
            ledger = stack.enter_context(Ledger(workspace.ledger, actor="successor@elsewhere:1"))
            return stack.enter_context(
                Publisher(ledger, workspace.storage, run=RUN, take_over=True)
            )

        yield take_over


class Hooked(DirectoryStorage):
    """A storage in which something happens elsewhere at a certain moment."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.after_stage: Callable[[], object] = lambda: None
        self.before_commit: Callable[[], object] = lambda: None
        self.after_commit: Callable[[], object] = lambda: None

    def stage(self, name: str, attempt: str) -> Staging:
        staging = super().stage(name, attempt)
        self.after_stage()
        return staging

    def commit(self, staging: Staging) -> None:
        self.before_commit()
        super().commit(staging)
        self.after_commit()


def test_a_fenced_publisher_is_told_who_holds_the_run(
    workspace: Workspace, ledger: Ledger, successor: Callable[[], Publisher]
) -> None:
    with Publisher(ledger, workspace.storage, run=RUN) as former:
        former.publish(workspace.adapter)
        new = successor()
        before = ledger.head()
        with pytest.raises(StaleEpoch, match="held by successor@elsewhere:1 since 20") as caught:
            former.publish(workspace.adapter)
        assert caught.value.holder == "successor@elsewhere:1"
        assert ledger.head() == before
        assert new.publish(workspace.adapter).version == 2
    assert ledger.run(RUN).holder == "successor@elsewhere:1"
    check_at_rest(ledger, workspace.root)


@pytest.mark.parametrize("moment", ["after_stage", "before_commit"])
def test_fenced_while_it_stages(
    workspace: Workspace, ledger: Ledger, successor: Callable[[], Publisher], moment: str
) -> None:
    storage = Hooked(workspace.root)
    with Publisher(ledger, storage, run=RUN) as former:
        setattr(storage, moment, successor)
        with pytest.raises(StaleEpoch, match="successor@elsewhere") as caught:
            former.publish(workspace.adapter)
        assert isinstance(caught.value.__cause__, StorageError)
    assert versions(ledger)[1].state == "rejected"
    check_at_rest(ledger, workspace.root)


def test_finished_by_its_successor_between_rename_and_append(
    workspace: Workspace, ledger: Ledger, successor: Callable[[], Publisher]
) -> None:
    """The successor adopts the directory; the former's own append then says what is true."""
    storage = Hooked(workspace.root)
    with Publisher(ledger, storage, run=RUN) as former:
        storage.after_commit = successor
        assert former.publish(workspace.adapter).version == 1
        with pytest.raises(StaleEpoch):
            former.publish(workspace.adapter)
    assert [e.kind for e in ledger.events(version=1)].count("version_published") == 1
    check_at_rest(ledger, workspace.root)


class BlindToStagings(DirectoryStorage):
    """Lists stagings as they were before the other publisher made one."""

    def stagings(self) -> list[Staging]:
        return []


def test_renamed_after_its_successor_has_swept(workspace: Workspace, ledger: Ledger) -> None:
    """Its append is refused; the directory is nobody's, and the next opening puts it away."""
    storage = Hooked(workspace.root)
    with (
        Ledger(workspace.ledger, actor="successor@elsewhere:1") as other,
        Publisher(ledger, storage, run=RUN) as former,
    ):
        new: list[Publisher] = []
        storage.before_commit = lambda: new.append(
            Publisher(other, BlindToStagings(workspace.root), run=RUN, take_over=True)
        )
        with pytest.raises(StaleEpoch):
            former.publish(workspace.adapter)
        assert versions(ledger)[1].state == "rejected"
        assert workspace.storage.names() == ["trl-policy-v1"]
        assert new[0].publish(workspace.adapter).version == 2
        new[0].close()
    Publisher(ledger, workspace.storage, run=RUN).close()
    check_at_rest(ledger, workspace.root)
    assert (workspace.root / ".quarantine").exists()


def test_another_run_closes_the_former(workspace: Workspace, ledger: Ledger) -> None:
    with (
        Publisher(ledger, workspace.storage, run=RUN) as former,
        Ledger(workspace.ledger, actor="other@elsewhere:1") as other,
    ):
        former.publish(workspace.adapter)
        with Publisher(other, workspace.storage, run="run-2", take_over=True) as new:
            with pytest.raises(StaleEpoch, match="run 'run-2' is held by other@elsewhere:1"):
                former.publish(workspace.adapter)
            assert new.publish(workspace.adapter).version == 2
    with pytest.raises(Refused, match="run 'run-1' is closed"):
        Publisher(ledger, workspace.storage, run=RUN)
    check_at_rest(ledger, workspace.root)


def fight(workspace: Workspace, number: int, claims: int) -> None:
    """Take the run over `claims` times and publish at most three versions each time.

    What `publish` returned is written down, one digest a version.
    """
    with workspace.root.with_name(f"returned-{number}").open("w") as returned:
        for claim in range(claims):
            directory = workspace.another(100 * number + claim)
            try:
                with (
                    Ledger(workspace.ledger, actor=f"publisher-{number}@elsewhere:1") as ledger,
                    Publisher(ledger, workspace.storage, run=RUN, take_over=True) as publisher,
                ):
                    for _ in range(3):
                        published = publisher.publish(directory)
                        returned.write(f"{published.version} {published.digest}\n")
            except StaleEpoch:
                continue


def test_processes_that_fight_over_a_run(workspace: Workspace, ledger: Ledger) -> None:
    """Every number once, every published name whole, every call that returned is recorded."""
    forks = multiprocessing.get_context("forkserver")
    fighters = [forks.Process(target=fight, args=(workspace, n, 12)) for n in range(3)]
    for fighter in fighters:
        fighter.start()
    for fighter in fighters:
        fighter.join()
        assert fighter.exitcode == 0
    Publisher(ledger, workspace.storage, run=RUN, take_over=True).close()
    check_at_rest(ledger, workspace.root)
    rows = versions(ledger)
    assert sorted(rows) == list(range(1, len(rows) + 1))
    lines = [
        line.split()
        for number in range(3)
        for line in workspace.root.with_name(f"returned-{number}").read_text().splitlines()
    ]
    returned = {int(version): digest for version, digest in lines}
    assert len(returned) == len(lines) > 0
    assert {version: rows[version].digest for version in returned} == returned
