"""What tests on engines share: waiting for a state, and adapters that are wrong on purpose."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from policyline.demo.synthetic import (
    TINY,
    BaseShape,
    adapter_config,
    adapter_tensors,
    write_adapter,
    write_files,
)
from policyline.watcher.settings import EngineTimeouts
from policyline.watcher.vllm.answers import Completion
from policyline.watcher.vllm.client import EngineClient
from policyline.watcher.vllm.errors import EngineError

PROMPT = tuple(range(5, 29))
"""A prompt of 24 tokens."""
LONG: dict[str, Any] = {"max_tokens": 450, "temperature": 0, "ignore_eos": True}
"""A long completion, the same each time; for a context of 512."""
PATIENT = EngineTimeouts(observe_s=60.0)
"""Where it matters what a server answers, and not how soon: all cores may be busy."""
ENDLESS: dict[str, Any] = {**LONG, "max_tokens": 4000}
"""A completion of many seconds, to be given up; for a context of 4,096."""
LENGTHS = (200, 270, 340, 450)
"""Tokens of the requests that follow each other in `decoding`."""


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Return once `condition` holds; it is asked again and again."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.005)


def group(leader: int) -> list[psutil.Process]:
    """Return the living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@dataclass
class Decoding:
    """Requests that follow each other, several at a time, and what became of them."""

    results: list[Completion] = field(default_factory=list)
    errors: list[EngineError] = field(default_factory=list)
    stopped: bool = False

    def agree_with(self, quiet: Completion) -> bool:
        """Return whether every result is a prefix of the one without company."""
        return all(
            done.token_ids == quiet.token_ids[: len(done.token_ids)] for done in self.results
        )

    async def ask(self, client: EngineClient, name: str, max_tokens: int) -> None:
        """Send one request after the other until the block ends or one fails."""
        while not self.stopped:
            try:
                ask = {**LONG, "max_tokens": max_tokens}
                self.results.append(await client.complete(name, PROMPT, **ask))
            except EngineError as error:
                self.errors.append(error)
                return


@contextlib.asynccontextmanager
async def decoding(client: EngineClient, *names: str) -> AsyncIterator[Decoding]:
    """Decode greedily under each of `names` all through the block, from when they are busy.

    Requests of unequal length, so that they do not all end at the same step: on a busy machine
    seconds can pass between two calls. Those in flight at the end of the block are awaited.
    """
    state = Decoding()
    running = [
        asyncio.create_task(state.ask(client, name, length)) for name in names for length in LENGTHS
    ]

    async def busy() -> bool:
        return set(names) <= ((await client.snapshot()).busy or set())

    try:
        await until(busy)
        yield state
    finally:
        state.stopped = True
        await asyncio.gather(*running)


def zero_b(directory: Path) -> Path:
    """Write an adapter that changes nothing: B is zero."""
    tensors = adapter_tensors(1)
    for name in tensors:
        if "lora_B" in name:
            tensors[name] = np.zeros_like(tensors[name])
    return write_files(directory, adapter_config(), tensors)


def not_a_number(directory: Path) -> Path:
    """Write an adapter of NaN alone."""
    tensors = {name: np.full_like(tensor, np.nan) for name, tensor in adapter_tensors(1).items()}
    return write_files(directory, adapter_config(), tensors)


def beyond_the_layers(directory: Path) -> Path:
    """Write an adapter for layers that the tiny base does not have."""
    tensors = {
        name.replace("layers.0.", "layers.7.").replace("layers.1.", "layers.8."): tensor
        for name, tensor in adapter_tensors(1).items()
    }
    return write_files(directory, adapter_config(), tensors)


def too_narrow(directory: Path) -> Path:
    """Write an adapter for a smaller model."""
    return write_adapter(directory, 1, shape=BaseShape(hidden_size=64, intermediate_size=128))


def _with_config(**overrides: object) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        return write_files(directory, adapter_config(overrides=overrides), adapter_tensors(1))

    return write


def _missing(directory: Path) -> Path:
    return directory


def _no_config(directory: Path) -> Path:
    (write_adapter(directory, 1) / "adapter_config.json").unlink()
    return directory


def _file(directory: Path) -> Path:
    directory.write_text("")
    return directory


def _no_weights(directory: Path) -> Path:
    (write_adapter(directory, 1) / "adapter_model.safetensors").unlink()
    return directory


def _truncated(directory: Path) -> Path:
    weights = write_adapter(directory, 1) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return directory


def _empty_file(directory: Path) -> Path:
    (write_adapter(directory, 1) / "adapter_model.safetensors").write_bytes(b"")
    return directory


def _no_json(directory: Path) -> Path:
    (write_adapter(directory, 1) / "adapter_config.json").write_text("rank: 1")
    return directory


def _no_rank(directory: Path) -> Path:
    config = adapter_config()
    del config["r"]
    write_adapter(directory, 1)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _high_rank(directory: Path) -> Path:
    return write_adapter(directory, 1, rank=16)


def _hidden_rank(directory: Path) -> Path:
    return write_files(directory, adapter_config(1), adapter_tensors(1, rank=16))


def _too_wide(directory: Path) -> Path:
    return write_adapter(directory, 1, shape=BaseShape(hidden_size=256))


def _unknown_module(directory: Path) -> Path:
    tensors = adapter_tensors(1)
    name = "base_model.model.lm_head"
    tensors[f"{name}.lora_A.weight"] = np.ones((1, TINY.hidden_size), np.float32)
    tensors[f"{name}.lora_B.weight"] = np.ones((512, 1), np.float32)
    return write_files(directory, adapter_config(), tensors)


def _named_adapter(directory: Path) -> Path:
    tensors = {
        name.replace(".weight", ".default.weight"): tensor
        for name, tensor in adapter_tensors(1).items()
    }
    return write_files(directory, adapter_config(), tensors)


def _no_tensors(directory: Path) -> Path:
    return write_files(directory, adapter_config(), {})


def _without(tensor: str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        tensors = adapter_tensors(1)
        del tensors[f"base_model.model.model.layers.0.{tensor}.weight"]
        return write_files(directory, adapter_config(), tensors)

    return write


lone_b_of_a_fused_layer = _without("self_attn.q_proj.lora_A")
"""Writes an adapter that vLLM takes, although it is wrong."""

REFUSED: dict[str, tuple[Callable[[Path], Path], int, str, str]] = {
    "missing": (_missing, 404, "No adapter found for", "files_missing"),
    "no config": (_no_config, 404, "No adapter found for", "files_missing"),
    "a file": (_file, 500, "[Errno 20] Not a directory", "not_a_directory"),
    "no weights": (_no_weights, 500, "doesn't contain tensors", "no_weights"),
    "truncated": (_truncated, 500, "incomplete metadata, file not", "weights_unreadable"),
    "empty file": (_empty_file, 500, "header too small", "weights_unreadable"),
    "config no JSON": (_no_json, 500, "Expecting value", "config_unreadable"),
    "config without r": (_no_rank, 500, "Missing required", "config_unreadable"),
    "rank": (_high_rank, 500, "LoRA rank 16 is greater than max_lora_rank 8.", "rank"),
    "rank of tensors": (_hidden_rank, 500, "size of tensor", "shape"),
    "too wide": (_too_wide, 500, "The size of tensor a (128) must match", "shape"),
    "head": (_unknown_module, 500, "expected target modules in", "modules"),
    "adapter's name": (_named_adapter, 500, "is unsupported LoRA weight", "tensors"),
    "no tensors": (_no_tensors, 500, "Worker failed with error ''", "tensors"),
    "B without A": (_without("self_attn.o_proj.lora_A"), 500, "failed with error ''", "tensors"),
    "A without B": (_without("mlp.up_proj.lora_B"), 500, "'NoneType' and 'float'", "tensors"),
    "DoRA": (_with_config(use_dora=True), 500, "not yet support DoRA.", "unsupported"),
    "bias": (_with_config(bias="all"), 500, "Adapter bias is not", "unsupported"),
    "lora_bias": (_with_config(lora_bias=True), 500, "LoRA bias", "unsupported"),
    "PiSSA": (_with_config(init_lora_weights="pissa"), 500, "'pissa'", "unsupported"),
    "saved modules": (
        _with_config(modules_to_save=["lm_head"]),
        500,
        "Unsupported modules_to_save: ['lm_head']",
        "unsupported",
    ),
}
"""Adapters that vLLM refuses: how to write one, status, a part of the text, our reason."""
