"""What the sweep finishes, puts away, and leaves alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.manifest import MANIFEST_NAME, Manifest
from policyline.publisher import Publisher, UnknownVersion
from policyline.storage import DirectoryStorage, StorageUnavailable
from tests.integration.publisher.workspace import RUN, Workspace, check_at_rest, versions

NAME = "trl-policy-v1"


class Died(BaseException):
    """Stands for the end of the process: nothing after it is cleaned up."""


class MortalLedger(Ledger):
    """Its process ends where it would append the publication, or reject."""

    def publish(self, *_args: object, **_kwargs: object) -> None:  # type: ignore[override]  # never returns
        raise Died

    def reject(self, *_args: object, **_kwargs: object) -> None:
        raise Died


def die_renamed(workspace: Workspace) -> Path:
    """Leave a version that is renamed and not appended; returns its directory."""
    with MortalLedger(workspace.ledger) as ledger:
        publisher = Publisher(ledger, workspace.storage, run=RUN)
        with pytest.raises(Died):
            publisher.publish(workspace.adapter)
        publisher.close()
    return workspace.root / NAME


def reopen(workspace: Workspace, ledger: Ledger) -> None:
    Publisher(ledger, workspace.storage, run=RUN).close()


def quarantined(workspace: Workspace) -> list[str]:
    shelf = workspace.root / ".quarantine"
    return sorted(p.name for p in shelf.iterdir() if p.is_dir()) if shelf.exists() else []


def test_adopts_what_matches_its_reservation(workspace: Workspace, ledger: Ledger) -> None:
    die_renamed(workspace)
    claimed = versions(ledger)[1]
    reopen(workspace, ledger)
    row = versions(ledger)[1]
    assert row.state == "published"
    assert row.attempt == claimed.attempt
    (event,) = [e for e in ledger.events() if e.kind == "version_published"]
    assert event.epoch == claimed.epoch + 1
    assert Manifest.from_text(row.manifest or "").epoch == claimed.epoch
    check_at_rest(ledger, workspace.root)


def change_byte(directory: Path) -> None:
    weights = directory / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def lose_file(directory: Path) -> None:
    (directory / "README.md").unlink()


def lose_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).unlink()


def garble_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).write_bytes(b"\xff{")


def link_file(directory: Path) -> None:
    (directory / "README.md").rename(directory.parent.with_name("elsewhere.md"))
    (directory / "README.md").symlink_to(directory.parent.with_name("elsewhere.md"))


def rewrite(directory: Path, **changes: object) -> None:
    path = directory / MANIFEST_NAME
    manifest = Manifest.from_text(path.read_text())
    path.write_text(dataclasses.replace(manifest, **changes).to_text())  # type: ignore[arg-type]  # field by name


def another_attempt(directory: Path) -> None:
    rewrite(directory, attempt="0123")


def another_run(directory: Path) -> None:
    rewrite(directory, run="run-2")


def another_epoch(directory: Path) -> None:
    rewrite(directory, epoch=9)


def another_number(directory: Path) -> None:
    rewrite(directory, version=2)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change_byte, "adapter_model.safetensors has sha256"),
        (lose_file, "README.md does not exist"),
        (lose_manifest, "manifest.json does not exist"),
        (garble_manifest, "manifest cannot be read"),
        (link_file, "README.md is a symbolic link"),
        (another_attempt, "its manifest has attempt 0123, reserved was"),
        (another_run, "its manifest has run run-2, reserved was run-1"),
        (another_epoch, "its manifest has epoch 9, reserved was 1"),
        (another_number, "its manifest has version 2, reserved was 1"),
    ],
)
def test_puts_away_what_does_not_match(
    workspace: Workspace, ledger: Ledger, damage: Callable[[Path], None], says: str
) -> None:
    damage(die_renamed(workspace))
    reopen(workspace, ledger)
    row = versions(ledger)[1]
    assert row.state == "rejected"
    assert row.reason.startswith("swept: ")
    assert says in row.reason
    assert quarantined(workspace) == [f"{NAME}-{row.attempt}"]
    reason = workspace.root / ".quarantine" / f"{NAME}-{row.attempt}.reason"
    assert says in reason.read_text()
    check_at_rest(ledger, workspace.root)


def test_puts_away_files_under_a_rejected_number(workspace: Workspace, ledger: Ledger) -> None:
    """As left by a fenced publisher that renamed after its successor had swept."""
    directory = die_renamed(workspace)
    hidden = directory.with_name(".aside")
    directory.rename(hidden)
    reopen(workspace, ledger)
    assert versions(ledger)[1].state == "rejected"
    hidden.rename(directory)
    reopen(workspace, ledger)
    assert quarantined(workspace) == [f"{NAME}-{versions(ledger)[1].attempt}"]
    check_at_rest(ledger, workspace.root)


def test_removes_stagings_of_its_own_dead_only(workspace: Workspace, ledger: Ledger) -> None:
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        reserved = ledger.reserve(publisher.claim)
        mine = workspace.storage.stage(reserved.name, reserved.attempt)
        (mine.path / "half.json").write_text("{")
    with Publisher(ledger, workspace.storage, run="run-2") as publisher:
        reserved = ledger.reserve(publisher.claim)
        theirs = workspace.storage.stage(reserved.name, reserved.attempt)
        other_attempt = workspace.storage.stage(reserved.name, "0123")
        other_line = workspace.storage.stage("other-line-v1", "0123")
    with Publisher(ledger, workspace.storage, run="run-2"):
        assert workspace.storage.stagings() == sorted(
            [mine, other_attempt, other_line], key=lambda s: s.path.name
        )
    assert not theirs.path.exists()
    assert versions(ledger, "run-2")[2].state == "rejected"
    assert versions(ledger, RUN)[1].state == "reserved"


def test_puts_away_a_stranger_under_a_name_of_the_line(
    workspace: Workspace, ledger: Ledger
) -> None:
    (workspace.root / "trl-policy-v5").mkdir()
    (workspace.root / "trl-policy-v5" / "adapter_config.json").write_text("{}")
    (workspace.root / "trl-policy-v6").write_text("a file")
    (workspace.root / "trl-policy-final").mkdir()
    (workspace.root / "other-line-v5").mkdir()
    reopen(workspace, ledger)
    assert workspace.storage.names() == ["other-line-v5", "trl-policy-final"]
    assert (workspace.root / ".quarantine" / "trl-policy-v6-unknown").read_text() == "a file"
    assert quarantined(workspace) == ["trl-policy-v5-unknown"]


def test_stops_at_versions_of_another_ledger(workspace: Workspace, ledger: Ledger) -> None:
    """A storage with versions that the ledger has not made: their names must not be reused (I1)."""
    with Publisher(ledger, workspace.storage, run=RUN) as publisher:
        publisher.publish(workspace.adapter)
    other = workspace.root.with_name("other.db")
    upgrade_url(str(other))
    with Ledger(str(other)) as empty:
        with pytest.raises(UnknownVersion, match=r"v1 is a version of another ledger.*--storage"):
            Publisher(empty, workspace.storage, run=RUN)
        assert empty.head()[0] == 0  # no run was opened for it
    assert workspace.storage.names() == [NAME]
    check_at_rest(ledger, workspace.root)


def test_stops_at_versions_that_a_restored_ledger_has_lost(workspace: Workspace) -> None:
    path = Path(workspace.ledger)
    before = path.read_bytes()
    with (
        Ledger(workspace.ledger) as ledger,
        Publisher(ledger, workspace.storage, run=RUN) as publisher,
    ):
        publisher.publish(workspace.adapter)
    for leftover in path.parent.glob(f"{path.name}-*"):
        leftover.unlink()
    path.write_bytes(before)
    with (
        Ledger(workspace.ledger) as ledger,
        pytest.raises(UnknownVersion, match=r"restored from an older copy\?"),
    ):
        Publisher(ledger, workspace.storage, run=RUN)
    assert workspace.storage.names() == [NAME]


class Unmounted(DirectoryStorage):
    """A mount that goes away between two calls."""

    def names(self) -> list[str]:
        self.root.rename(self.root.with_name("aside"))
        return super().names()


def test_concludes_nothing_from_a_storage_that_went_away(
    workspace: Workspace, ledger: Ledger
) -> None:
    die_renamed(workspace)
    with pytest.raises(StorageUnavailable):
        Publisher(ledger, Unmounted(workspace.root), run=RUN)
    assert versions(ledger)[1].state == "reserved"
    workspace.root.with_name("aside").rename(workspace.root)
    reopen(workspace, ledger)
    assert versions(ledger)[1].state == "published"
