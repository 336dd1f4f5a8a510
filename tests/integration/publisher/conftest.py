"""A fresh ledger in SQLite, a fresh storage, and adapters to publish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from policyline.ledger import Ledger
from tests.integration.publisher.places import Places, make_places


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Where everything is."""
    return make_places(tmp_path)


@pytest.fixture
def ledger(places: Places) -> Iterator[Ledger]:
    """The open ledger."""
    with Ledger(places.ledger) as opened:
        yield opened
