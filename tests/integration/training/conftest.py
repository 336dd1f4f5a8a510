"""Fixtures of the tests that train: a tiny model, and a fleet of doubles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.training.stage import Stage


@pytest.fixture
def stage(tmp_path: Path, tiny_base: Path) -> Iterator[Stage]:
    """Ledger, storage, a double with a sidecar; everything is stopped at the end."""
    vocabulary = json.loads((tiny_base / "config.json").read_text())["vocab_size"]
    with Stage(tmp_path, tiny_base, vocabulary) as stage:
        yield stage
