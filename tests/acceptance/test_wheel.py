"""The wheel, installed into an empty environment, is a working policyline."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this checkout in its path; return stdout."""
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
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
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", out, ROOT, cwd=out)
    (found,) = out.glob("policyline-*.whl")
    return found


def test_the_wheel_installs_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"policyline"}
    assert any(name.startswith("policyline/migrations/versions/0001") for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "policyline/py.typed" in names


@pytest.mark.timeout(600)
def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    run(venv / "bin" / "pip", "--quiet", "--no-input", "install", wheel, cwd=tmp_path)
    policyline = venv / "bin" / "policyline"

    assert "sidecar" in run(policyline, "--help", cwd=tmp_path)
    run(policyline, "ledger", "upgrade", "--ledger", tmp_path / "ledger.db", cwd=tmp_path)
    assert (tmp_path / "ledger.db").exists()
    found = json.loads(run(policyline, "demo", "--engine", "sim", "--json", cwd=tmp_path))
    assert found["ok"] is True
    assert [check["name"] for check in found["checks"] if not check["ok"]] == []
