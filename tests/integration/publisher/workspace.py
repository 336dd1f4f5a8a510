"""Where a test's ledger and storage are, and what must hold of them at rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from policyline.ledger import Ledger
from policyline.ledger.db.migrate import upgrade_url
from policyline.ledger.manifest import MANIFEST_NAME, Manifest
from policyline.ledger.names import policy_name
from policyline.ledger.read.verify import verify
from policyline.ledger.rows import VersionRow
from policyline.storage import DirectoryStorage, verify_files
from tests.unit.publisher.builders import write_adapter

RUN = "run-1"
LINE = "trl-policy"


@dataclass(frozen=True, slots=True)
class Workspace:
    """One ledger, one storage, one adapter."""

    ledger: str
    root: Path
    adapter: Path

    @property
    def storage(self) -> DirectoryStorage:
        return DirectoryStorage(self.root)

    def another(self, seed: int) -> Path:
        """Another adapter of the same shape."""
        return write_adapter(self.adapter.with_name(f"adapter-{seed}"), seed=seed)


def make_workspace(directory: Path) -> Workspace:
    directory.mkdir(exist_ok=True)
    workspace = Workspace(
        ledger=str(directory / "ledger.db"),
        root=directory / "storage",
        adapter=write_adapter(directory / "adapter"),
    )
    workspace.root.mkdir()
    upgrade_url(workspace.ledger)
    return workspace


def versions(ledger: Ledger, run: str = RUN) -> dict[int, VersionRow]:
    return {row.version: row for row in ledger.versions(run=run)}


def check_at_rest(ledger: Ledger, root: Path) -> None:
    """What holds when nobody publishes: nothing half-visible, nothing half-recorded (I1, I5)."""
    storage = DirectoryStorage(root)
    rows = ledger.versions(line=LINE)
    published = {policy_name(LINE, row.version): row for row in rows if row.digest is not None}
    assert storage.names() == sorted(published)
    assert storage.stagings() == []
    for name, row in published.items():
        text = (root / name / MANIFEST_NAME).read_text()
        assert text == row.manifest
        manifest = Manifest.from_text(text)
        assert manifest.digest == row.digest
        verify_files(root / name, manifest.files)
    assert {row.state for row in rows} <= {"published", "skipped", "rejected"}
    assert verify(ledger).problems == ()
