"""A user's training directory, whose own modules have the names of our folders."""

from __future__ import annotations

from pathlib import Path

NAMES = ("ledger", "migrations", "publisher", "router", "storage", "watcher")
TRAP = 'raise AssertionError("a module of the user was imported: " + __name__)\n'
TRAIN = """\
from pathlib import Path

import policyline
import policyline.publisher.settings
from policyline import Ledger, Publisher, PublishTo, open_storage
from policyline.demo.synthetic import write_adapter
from policyline.ledger.db.migrate import upgrade_url

here = Path(__file__).parent
assert policyline.publisher.settings.PublishTo is PublishTo
upgrade_url(str(here / "run.db"))  # runs every migration
(here / "bytes").mkdir()
adapter = write_adapter(here / "adapter", 1)
storage = open_storage(str(here / "bytes"))
with Ledger(str(here / "run.db")) as ledger, Publisher(ledger, storage, run="mine") as publisher:
    print(publisher.publish(adapter).name)
"""
"""Publishes one small adapter; prints its name."""


def write_project(directory: Path) -> Path:
    """Write `train.py`, and next to it modules that fail when they are imported; its path."""
    directory.mkdir(exist_ok=True)
    for name in NAMES:
        if name == "migrations":
            (directory / name).mkdir()
            (directory / name / "__init__.py").write_text(TRAP)
        else:
            (directory / f"{name}.py").write_text(TRAP)
    script = directory / "train.py"
    script.write_text(TRAIN)
    return script
