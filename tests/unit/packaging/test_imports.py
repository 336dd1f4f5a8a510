"""What importing the packages must not bring with it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "peft", "vllm")


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "package",
    [
        "policyline.ledger.store",
        "policyline.storage",
        "policyline.publisher.publisher",
        "policyline.watcher.vllm.client",
        "policyline.router.app",
        "policyline.trainers.adapter",
        "policyline.cli",
        "policyline.demo.run",
        "policyline.engines.simulated.app",
    ],
)
def test_the_core_imports_without_torch(package: str) -> None:
    assert not modules_after(f"import {package}") & set(HEAVY)


def test_the_manifest_imports_without_a_database_library() -> None:
    assert not modules_after("import policyline.ledger.manifest") & {"sqlalchemy", "alembic"}


def test_the_detector_detects() -> None:
    assert "sqlalchemy" in modules_after("import policyline.ledger.store")
