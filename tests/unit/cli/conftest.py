"""The command line sets up the process's logs; other tests are to find them as they were."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore what `set_up_logs` changes."""
    root, ours = logging.getLogger(), logging.getLogger("policyline")
    before = list(root.handlers), root.level, ours.level
    yield
    handlers, root_level, level = before
    root.handlers[:] = handlers
    root.setLevel(root_level)
    ours.setLevel(level)
