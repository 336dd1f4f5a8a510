"""`python -m policyline.engines.simulated --port 0`: one double as a process of its own."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, or the engine's death; both end with status 0, as in vLLM."""
    arguments = _parser().parse_args(argv)
    asyncio.run(_serve(_options(arguments), arguments.port))
    return 0


def _parser() -> argparse.ArgumentParser:
    engine, service = EngineOptions(), ServiceOptions()
    parser = argparse.ArgumentParser(
        prog="python -m policyline.engines.simulated",
        description="A double of vLLM 0.32's LoRA surface. Prints its port once it listens.",
    )
    parser.add_argument("model", nargs="?", default=service.model, help="path shown as the base")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--served-model-name", default=service.served_model_name)
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--max-loras", type=int, default=engine.max_loras)
    parser.add_argument("--max-cpu-loras", type=int, default=None)
    parser.add_argument("--max-lora-rank", type=int, default=engine.max_lora_rank)
    parser.add_argument("--max-num-seqs", type=int, default=engine.max_num_seqs)
    parser.add_argument("--max-model-len", type=int, default=engine.max_model_len)
    parser.add_argument("--block-size", type=int, default=engine.block_size)
    parser.add_argument("--vocab-size", type=int, default=engine.vocab_size)
    parser.add_argument("--hidden-size", type=int, default=None, help="check adapters against it")
    parser.add_argument("--layers", type=int, default=None, help="ignore tensors beyond them")
    parser.add_argument("--load-delay-s", type=float, default=service.load_delay_s)
    parser.add_argument("--step-delay-s", type=float, default=service.step_delay_s)
    parser.add_argument("--no-lora", action="store_true", help="as without --enable-lora")
    parser.add_argument("--no-runtime-lora", action="store_true")
    parser.add_argument("--no-dev-mode", action="store_true")
    return parser


def _options(arguments: argparse.Namespace) -> ServiceOptions:
    return ServiceOptions(
        engine=EngineOptions(
            max_loras=arguments.max_loras,
            max_cpu_loras=arguments.max_cpu_loras,
            max_lora_rank=arguments.max_lora_rank,
            max_num_seqs=arguments.max_num_seqs,
            max_model_len=arguments.max_model_len,
            block_size=arguments.block_size,
            vocab_size=arguments.vocab_size,
        ),
        served_model_name=arguments.served_model_name,
        model=arguments.model,
        hidden_size=arguments.hidden_size,
        layers=arguments.layers,
        enable_lora=not arguments.no_lora,
        runtime_lora=not arguments.no_runtime_lora,
        dev_mode=not arguments.no_dev_mode,
        api_key=arguments.api_key,
        load_delay_s=arguments.load_delay_s,
        step_delay_s=arguments.step_delay_s,
    )


async def _serve(options: ServiceOptions, port: int) -> None:
    server = SimulatedServer(options, port=port)
    await server.start()
    print(server.port, flush=True)  # noqa: T201 - the command's result
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (asked, server.closed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await server.terminate()


if __name__ == "__main__":
    sys.exit(main())
