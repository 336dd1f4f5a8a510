"""`policyline publish`: what a person sees, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file, save_file

from policyline.cli.publish import read_metadata
from policyline.ledger import Ledger
from tests.integration.publisher.workspace import RUN, Workspace, check_at_rest
from tests.unit.publisher.builders import write_adapter


def run(
    workspace: Workspace, *args: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command with ledger and storage from the environment."""
    return subprocess.run(
        [sys.executable, "-c", "from policyline.cli import main; main()", "publish", *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {"POLICYLINE_LEDGER": workspace.ledger, "POLICYLINE_STORAGE": str(workspace.root)}
        | dict(env or {}),
    )


def test_publishes_and_says_what(workspace: Workspace, ledger: Ledger) -> None:
    done = run(workspace, str(workspace.adapter), "--run", RUN, "--max-staleness", "2")
    assert done.returncode == 0, done.stderr
    fields = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert fields["name"] == "trl-policy-v1"
    assert fields["digest"] == ledger.version("trl-policy", 1).digest
    assert fields["path"] == str(workspace.root / "trl-policy-v1")
    assert "commit" in fields["phases"]
    assert ledger.run(RUN).max_staleness == 2
    check_at_rest(ledger, workspace.root)


def test_json_and_metadata(workspace: Workspace, ledger: Ledger) -> None:
    args = ("--run", RUN, "--json", "--metadata", "step=40", "--metadata", "note=a=b")
    done = run(workspace, str(workspace.adapter), *args)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["version"], printed["name"]) == (1, "trl-policy-v1")
    manifest = json.loads(ledger.version("trl-policy", 1).manifest or "")
    assert manifest["metadata"] == {"step": 40, "note": "a=b", "zero_init": False}


def test_options_come_from_the_environment(workspace: Workspace, ledger: Ledger) -> None:
    env = {"POLICYLINE_RUN": RUN, "POLICYLINE_LINE": "other", "POLICYLINE_VERSION": "5"}
    done = run(workspace, str(workspace.adapter), env=env)
    assert done.returncode == 0, done.stderr
    assert ledger.version("other", 5).state == "published"


def test_a_retry_with_the_number(workspace: Workspace, ledger: Ledger) -> None:
    args = (str(workspace.adapter), "--run", RUN, "--version", "3")
    assert run(workspace, *args).returncode == 0
    head = ledger.head()[0]
    again = run(workspace, *args)
    assert again.returncode == 0
    assert "published before with these bytes" in again.stdout
    assert [e.kind for e in ledger.events(after=head)] == ["epoch_claimed", "epoch_released"]
    other = run(workspace, str(workspace.another(4)), "--run", RUN, "--version", "3")
    assert other.returncode == 1
    assert other.stderr.startswith("policyline: trl-policy-v3 was published in run 'run-1'")


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (["--storage", "s3://bucket"], 2, "is not a directory; give a path"),
        (["--storage", "/dev/null/gone"], 3, "/dev/null/gone"),
        (["--ledger", "/dev/null/gone.db"], 3, "/dev/null"),
        (["--max-lora-rank", "1"], 1, "rank 2 is above the servers' limit 1; start the servers"),
        (["--metadata", "step"], 2, "--metadata 'step' is not KEY=VALUE"),
        (["--min-ready", "some"], 2, "'some' is not a number of replicas, 1 to 1000000, or 'all'"),
        (["--version", "0"], 2, "--version"),
        (["--run", "no/slash"], 2, "run 'no/slash' is not usable"),
        (["--base-model", "gone"], 2, "gone"),
    ],
)
def test_a_wrong_option_changes_nothing(
    workspace: Workspace, ledger: Ledger, change: list[str], code: int, says: str
) -> None:
    done = run(workspace, str(workspace.adapter), "--run", RUN, *change)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in " ".join(done.stderr.replace("│", " ").split())
    assert ledger.head()[0] == 0
    assert workspace.storage.names() == []


def test_a_bad_directory_opens_no_run(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "dora", use_dora=True)
    done = run(workspace, str(directory), "--run", RUN)
    assert done.returncode == 1
    assert done.stderr == (
        f"policyline: {directory}: vLLM cannot serve this adapter: DoRA (use_dora=True); "
        "train without it, or serve merged weights (merged sync)\n"
    )
    assert ledger.head()[0] == 0


@pytest.mark.parametrize("pairs", [["a"], ["=b"], ["a=1", "a=2"]])
def test_metadata_that_is_no_pair(pairs: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        read_metadata(pairs)


def test_metadata_keeps_json_and_takes_the_rest_as_text() -> None:
    assert read_metadata(["a=1", "b=true", "c=[1]", "d=x y", "e="]) == {
        "a": 1,
        "b": True,
        "c": [1],
        "d": "x y",
        "e": "",
    }


def test_a_mistyped_run_closes_nothing(workspace: Workspace) -> None:
    assert run(workspace, str(workspace.adapter), "--run", RUN).returncode == 0
    done = run(workspace, str(workspace.another(4)), "--run", "typo")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"run '{RUN}' is open" in done.stderr
    assert "open-run typo" in done.stderr
    with Ledger(workspace.ledger) as ledger:
        assert [(r.run, r.state) for r in ledger.runs()] == [(RUN, "open")]
    assert (
        run(workspace, str(workspace.another(4)), "--run", "fork", "--parent-run", RUN).returncode
        == 0
    )


def test_a_name_that_no_run_can_have_is_not_suggested(workspace: Workspace) -> None:
    assert run(workspace, str(workspace.adapter), "--run", RUN).returncode == 0
    done = run(workspace, str(workspace.another(4)), "--run", "my run; ls")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run 'my run; ls' is not usable; use letters" in done.stderr
    assert "open-run" not in done.stderr


def test_a_nan_opens_no_run(workspace: Workspace) -> None:
    bad = workspace.another(5)
    weights = bad / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, weights)
    done = run(workspace, str(bad), "--run", RUN)
    assert done.returncode == 1
    assert "NaN" in done.stderr
    with Ledger(workspace.ledger) as ledger:
        assert ledger.head()[0] == 0


def test_a_first_run_needs_nothing(workspace: Workspace, tmp_path: Path) -> None:
    """Ledger and storage are created, and stderr says so; a second run finds them."""
    first = tmp_path / "first" / "run"
    there = {
        "POLICYLINE_LEDGER": str(first / "run.db"),
        "POLICYLINE_STORAGE": str(first / "policies"),
    }
    done = run(workspace, str(workspace.adapter), "--run", RUN, env=there)
    assert done.returncode == 0, done.stderr
    assert f"created the ledger {first / 'run.db'}" in done.stderr
    assert f"created the storage {first / 'policies'}" in done.stderr
    with Ledger(there["POLICYLINE_LEDGER"]) as ledger:
        check_at_rest(ledger, first / "policies")
    again = run(workspace, str(workspace.another(4)), "--run", RUN, env=there)
    assert (again.returncode, "created" in again.stderr) == (0, False), again.stderr


@pytest.mark.parametrize(
    "change", [("--max-lora-rank", "1"), ("--run", "no/slash"), ("--storage", "s3://bucket")]
)
def test_what_is_refused_creates_nothing(
    workspace: Workspace, tmp_path: Path, change: tuple[str, str]
) -> None:
    first = tmp_path / "first"
    there = {
        "POLICYLINE_LEDGER": str(first / "run.db"),
        "POLICYLINE_STORAGE": str(first / "policies"),
    }
    done = run(workspace, str(workspace.adapter), "--run", RUN, *change, env=there)
    assert done.returncode != 0
    assert not first.exists()
