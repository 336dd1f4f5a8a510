"""The double as a child process, with the interface of the real server's launcher."""

import sys
from dataclasses import asdict, fields
from pathlib import Path

from policyline.engines.child import ChildServer
from policyline.engines.simulated.engine import EngineOptions
from policyline.engines.simulated.service import ServiceOptions

FLAGS = {
    f"--{'no-' if field.default is True else ''}{field.name.removeprefix('enable_')}".replace(
        "_", "-"
    ): field
    for options in (EngineOptions, ServiceOptions)
    for field in fields(options)
    if field.name not in {"engine", "model"}
}
"""Flag of the command line to option; what is on by default is switched off by `--no-...`."""


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
    command = [sys.executable, "-m", "policyline.engines.simulated", options.model]
    command += ["--port", "{port}"]
    values = {**asdict(options), **asdict(options.engine)}
    for flag, field in FLAGS.items():
        value = values[field.name]
        if value is False:
            command.append(flag)
        elif value is not None and value is not True:
            command += [flag, str(value)]
    return command
