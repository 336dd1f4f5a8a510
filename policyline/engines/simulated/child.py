"""The double as a child process, with the interface of the real server's launcher."""

import sys
from pathlib import Path

from policyline.engines.child import ChildServer
from policyline.engines.simulated.service import ServiceOptions


class SimulatedChild(ChildServer):
    """One `python -m policyline.engines.simulated`.

    Args:
        options: see `ServiceOptions`.
        port: 0 for a free one.
        log_path: its output; None for a temporary file.
    """

    def __init__(
        self,
        options: ServiceOptions | None = None,
        *,
        port: int = 0,
        log_path: Path | None = None,
    ) -> None:
        self.options = options or ServiceOptions()
        super().__init__(_command(self.options), port=port, log_path=log_path)


def _command(options: ServiceOptions) -> list[str]:
    engine = options.engine
    command = [sys.executable, "-m", "policyline.engines.simulated", options.model]
    values: dict[str, object] = {
        "--port": "{port}",
        "--served-model-name": options.served_model_name,
        "--api-key": options.api_key,
        "--max-loras": engine.max_loras,
        "--max-cpu-loras": engine.max_cpu_loras,
        "--max-lora-rank": engine.max_lora_rank,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-model-len": engine.max_model_len,
        "--block-size": engine.block_size,
        "--vocab-size": engine.vocab_size,
        "--hidden-size": options.hidden_size,
        "--layers": options.layers,
        "--load-delay-s": options.load_delay_s,
        "--step-delay-s": options.step_delay_s,
    }
    flags = {
        "--no-lora": not options.enable_lora,
        "--no-runtime-lora": not options.runtime_lora,
        "--no-dev-mode": not options.dev_mode,
    }
    for name, value in values.items():
        if value is not None:
            command += [name, str(value)]
    return [*command, *(flag for flag, given in flags.items() if given)]
