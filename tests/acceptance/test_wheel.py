"""Wheel and sdist hold one package, and the installed wheel is a working policyline."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.unit.packaging.user_project import write_project

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--no-input")


def run(*command: str | Path, cwd: Path, python_path: str | None = None) -> str:
    """Run a command without this checkout in its path; return stdout."""
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    if python_path is not None:
        environment["PYTHONPATH"] = python_path
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    return build_wheel(ROOT, out)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(*PIP, "install", "--target", out / "backend", "hatchling>=1.27", cwd=out)
    build = (sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", out)
    run(*build, cwd=ROOT, python_path=str(out / "backend"))
    (found,) = out.glob("policyline-*.tar.gz")
    return found


def build_wheel(source: Path, out: Path) -> Path:
    """Build the wheel of a directory or an sdist into `out`, as `pip install` does."""
    run(*PIP, "wheel", "--no-deps", "--wheel-dir", out, source, cwd=out)
    (found,) = out.glob("policyline-*.whl")
    return found


def test_the_wheel_installs_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"policyline"}
    assert any(name.startswith("policyline/migrations/versions/0001") for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "policyline/py.typed" in names


def test_the_sdist_holds_each_file_once(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    top = {member.name.split("/")[1] for member in members}
    assert top >= {"policyline", "pyproject.toml", "README.md", "LICENSE"}
    assert not top & {"ledger", "migrations", "publisher", "router", "storage", "watcher"}
    assert all(member.isfile() for member in members)  # a link would point outside of the archive


@pytest.mark.timeout(180)
def test_a_wheel_of_the_sdist_equals_the_wheel_of_the_checkout(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    """With the top-level folders in the sdist, hatchling left `policyline/ledger` out of it."""
    assert contents(build_wheel(sdist, tmp_path)) == contents(wheel)


def contents(wheel: Path) -> dict[str, int]:
    """File -> checksum of its content."""
    return {entry.filename: entry.CRC for entry in zipfile.ZipFile(wheel).infolist()}


@pytest.mark.timeout(600)
def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    run(venv / "bin" / "pip", "--quiet", "--no-input", "install", wheel, cwd=tmp_path)
    policyline = venv / "bin" / "policyline"

    script = write_project(tmp_path / "project")
    trained = run(venv / "bin" / "python", script, cwd=script.parent)
    assert trained == "trl-policy-v1\n"

    assert "sidecar" in run(policyline, "--help", cwd=tmp_path)
    run(policyline, "ledger", "upgrade", "--ledger", tmp_path / "ledger.db", cwd=tmp_path)
    assert (tmp_path / "ledger.db").exists()
    found = json.loads(run(policyline, "demo", "--engine", "sim", "--json", cwd=tmp_path))
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"] if not check["ok"]] == []
