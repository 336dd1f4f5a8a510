"""What is said of an adapter, what TRL would do with it, and how vLLM is started for it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policyline.demo.synthetic import adapter_config, adapter_tensors, write_adapter, write_files
from policyline.doctor.adapter import adapter_lines, examine_adapter
from policyline.doctor.engine_facts import ServerConfig
from policyline.doctor.launch import launch_line, served_rank
from policyline.doctor.model import Failure, Status, Window
from policyline.doctor.releases import parse_release
from policyline.doctor.trl import SyncMode, choose
from tests.unit.doctor.builders import CONFIG, ENGINE, WINDOW, by_name


@pytest.mark.parametrize(
    ("overrides", "server", "staleness", "mode", "why"),
    [
        ({}, CONFIG, 4, "adapter", ""),
        ({}, None, 4, "adapter", ""),
        ({"init_lora_weights": "pissa"}, CONFIG, 4, "adapter", ""),
        ({"use_dora": True}, CONFIG, 4, "merged", "use_dora"),
        ({"modules_to_save": ["lm_head"]}, None, 4, "merged", "modules_to_save"),
        ({"target_parameters": ["x"]}, None, 4, "merged", "target_parameters"),
        ({"bias": "all"}, None, 4, "merged", "bias"),
        ({"peft_type": "IA3"}, None, 4, "merged", "IA3"),
        ({"target_modules": ["q_proj", "lm_head"]}, None, 4, "merged", "head"),
        ({"target_modules": ".*embed_tokens"}, None, 4, "merged", "embeddings"),
        ({}, replace(CONFIG, has_lora=False), 4, "merged", "--enable-lora"),
        ({}, replace(CONFIG, data_parallel=2), 4, "merged", "data_parallel_size 2"),
        ({"r": 16}, CONFIG, 4, "refuses", "rank 16"),
        ({"rank_pattern": {"q_proj": 16}}, CONFIG, 4, "refuses", "rank 16"),
        ({}, CONFIG, 5, "refuses", "below 7"),
        ({}, replace(CONFIG, max_loras=None, max_lora_rank=None), 9, "adapter", ""),
    ],
)
def test_what_trl_would_choose(
    overrides: dict[str, Any],
    server: ServerConfig | None,
    staleness: int,
    mode: SyncMode,
    why: str,
) -> None:
    chosen, because = choose(adapter_config(overrides=overrides), server, staleness)

    assert (chosen, why in because) == (mode, True)


_ASK_TRL = """
import json, sys, types
import accelerate, peft
from trl.experimental.async_grpo.async_grpo_trainer import select_adapter_sync

accelerate.PartialState(cpu=True)
server = {
    "lora_config": {"max_lora_rank": 8, "max_loras": 6},
    "parallel_config": {"data_parallel_size": 1},
}
for directory in sys.argv[1:]:
    config = peft.LoraConfig.from_pretrained(directory)
    model = types.SimpleNamespace(active_adapters=["d"], peft_config={"d": config})
    try:
        alone = select_adapter_sync(server, model, types.SimpleNamespace(max_staleness=4))
    except ValueError:
        print("refuses")
    else:
        print("adapter" if alone else "merged")
"""


@pytest.mark.engine
def test_trl_itself_chooses_so(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"init_lora_weights": "pissa"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ".*q_proj"},
        {"r": 16},
        {"rank_pattern": {"q_proj": 9}},
    ]
    directories = []
    for number, overrides in enumerate(cases):
        directories.append(tmp_path / str(number))
        write_files(directories[-1], adapter_config(overrides=overrides), adapter_tensors(1))

    command = [sys.executable, "-W", "ignore", "-c", _ASK_TRL, *map(str, directories)]
    asked = subprocess.run(command, check=True, capture_output=True, text=True)

    ours = [choose(adapter_config(overrides=overrides), CONFIG, 4)[0] for overrides in cases]
    assert asked.stdout.split() == ours


def lines_of(directory: Path, **engine: Any) -> dict[str, tuple[Status, str, str]]:
    found = examine_adapter(directory, None)
    lines = by_name(adapter_lines(found, replace(ENGINE, **engine), WINDOW))
    return {name: (line.status, line.value, line.remedy) for name, line in lines.items()}


def test_an_adapter_that_fits_passes(tmp_path: Path) -> None:
    lines = lines_of(write_adapter(tmp_path, 1))

    assert {status for status, _, _ in lines.values()} == {"pass"}
    assert "rank 1, 28 tensors of F32" in lines["adapter.servable"][1]


@pytest.mark.parametrize(
    ("rank", "limit", "status", "remedy"),
    [
        (8, 8, "pass", ""),
        (9, 8, "fail", "--max-lora-rank 16"),
        (9, None, "warn", "--max-lora-rank 16"),
        (600, 512, "fail", "smaller rank"),
    ],
)
def test_the_rank_against_the_server(
    tmp_path: Path, rank: int, limit: int | None, status: Status, remedy: str
) -> None:
    lines = lines_of(
        write_adapter(tmp_path, 1, rank=rank), server=replace(CONFIG, max_lora_rank=limit)
    )
    found = lines["engine.max_lora_rank"]

    assert (found[0], remedy in found[2]) == (status, True)


def test_an_adapter_that_cannot_be_served_says_why_and_what_trl_does(tmp_path: Path) -> None:
    dora = write_files(
        tmp_path / "a", adapter_config(overrides={"use_dora": True}), adapter_tensors(1)
    )
    lines = lines_of(dora)
    assert lines["adapter.servable"][0] == "fail"
    assert "DoRA" in lines["adapter.servable"][1]
    assert lines["adapter.trl_sync"][:1] == ("warn",)

    pissa = adapter_config(overrides={"init_lora_weights": "pissa"})
    lines = lines_of(write_files(tmp_path / "b", pissa, adapter_tensors(1)))
    assert lines["adapter.trl_sync"][:2] == (
        "warn",
        "adapter, although vLLM would refuse it at the first sync",
    )


def test_what_is_no_adapter_is_one_line(tmp_path: Path) -> None:
    found = examine_adapter(tmp_path / "nowhere", None)
    (line,) = adapter_lines(found, None, WINDOW)

    assert (line.status, line.unreachable) == ("fail", False)
    assert (found.rank, found.base_model) == (None, None)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "b"}))
    assert examine_adapter(tmp_path, None).base_model == "b"
    assert isinstance(examine_adapter(tmp_path, None).source, Failure)


@pytest.mark.parametrize(
    ("rank", "served"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512), (513, None)]
)
def test_the_rank_that_is_served(rank: int, served: int | None) -> None:
    assert served_rank(rank) == served


def test_the_launch_line_is_a_shells() -> None:
    line = launch_line(Window(4, ""), rank=4, base_model="/models/my model")

    words = shlex.split(line)
    assert words[:4] == [
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        "vllm",
        "serve",
        "/models/my model",
    ]
    assert words[4:] == (
        ["--enable-lora", "--max-loras", "6", "--max-cpu-loras", "12", "--max-lora-rank", "8"]
    )
    assert " MODEL " in launch_line(Window(0, ""), rank=None, base_model=None)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.33", (0, 33, 0)),
        ("0.31.0+cpu", (0, 31, 0)),
        ("0.10.1.post2", (0, 10, 1)),
        ("0.27.2rc0", None),
        ("main", None),
    ],
)
def test_releases(text: str, release: tuple[int, int, int] | None) -> None:
    assert parse_release(text) == release
