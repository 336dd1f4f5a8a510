"""`python -m policyline.engines.simulated --port 0`: one double as a process of its own."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import get_args

from policyline.engines.simulated.child import FLAGS
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.server import SimulatedServer
from policyline.engines.simulated.service import ServiceOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, or the engine's death; both end with status 0, as in vLLM."""
    arguments = vars(_parser().parse_args(argv))
    port = arguments.pop("port")
    engine = EngineOptions(**{f.name: arguments.pop(f.name) for f in fields(EngineOptions)})
    asyncio.run(_serve(ServiceOptions(engine, **arguments), port))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m policyline.engines.simulated",
        description="A double of vLLM 0.32's LoRA surface. Prints its port once it listens.",
    )
    model = ServiceOptions().model
    parser.add_argument("model", nargs="?", default=model, help="path shown as the base")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    for flag, field in FLAGS.items():
        if field.default is True:
            parser.add_argument(flag, dest=field.name, action="store_false")
        else:
            kind = next(iter(get_args(field.type)), field.type)  # of `int | None`: int
            parser.add_argument(flag, type=kind, default=field.default)
    return parser


async def _serve(options: ServiceOptions, port: int) -> None:
    server = SimulatedServer(options, port=port)
    await server.start()
    print(server.port, flush=True)  # noqa: T201 - the command's result
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.closed.set)
    await server.closed.wait()
    await server.terminate()


if __name__ == "__main__":
    sys.exit(main())
