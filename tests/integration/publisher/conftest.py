"""A fresh ledger in SQLite, a fresh storage, and adapters to publish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from tests.integration.publisher.workspace import Workspace, make_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Where everything is."""
    return make_workspace(tmp_path)


@pytest.fixture
def ledger(workspace: Workspace) -> Iterator[Ledger]:
    """The open ledger."""
    with Ledger(workspace.ledger) as opened:
        yield opened
