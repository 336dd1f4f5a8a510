"""A user's own `storage.py` or `migrations/` next to `train.py` does not shadow our packages.

Python puts the script's directory first in `sys.path`. When `storage`, `router`, `ledger` and
`migrations` were top-level packages of ours, `import storage` inside them found the user's
`storage.py`, and every `python train.py` in such a directory failed. Inside the one package
`policyline` the names cannot collide. The same script runs with the wheel in
acceptance/test_wheel.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.packaging.user_project import NAMES, write_project

IMPORT_ALL = """\
import importlib

import policyline

for name in {names}:
    try:
        importlib.import_module(name)
    except AssertionError as error:
        print(error)
"""


def run(script: Path) -> str:
    """Run a script as a user does, without this checkout in PYTHONPATH; return stdout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, script.name],
        check=False,
        capture_output=True,
        text=True,
        cwd=script.parent,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_script_publishes_next_to_modules_with_our_folders_names(tmp_path: Path) -> None:
    script = write_project(tmp_path)

    assert run(script) == "trl-policy-v1\n"
    assert (tmp_path / "bytes" / "trl-policy-v1" / "manifest.json").exists()


def test_the_users_modules_are_found_under_their_plain_names(tmp_path: Path) -> None:
    """Without this the test above could pass because its traps are not in the path."""
    script = write_project(tmp_path).with_name("check.py")
    script.write_text(IMPORT_ALL.format(names=NAMES))

    found = run(script).splitlines()

    assert found == [f"a module of the user was imported: {name}" for name in NAMES]
