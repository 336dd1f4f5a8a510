"""The root command, one module per verb; errors become one line on stderr and an exit code."""

from __future__ import annotations

import errno
import importlib.metadata
import sys
from typing import Annotated

import typer

from policyline.cli import demo, doctor, ledger, publish, router, sidecar
from policyline.cli.command import LogFormatOption, VerboseOption, add_command
from policyline.cli.output import visible
from policyline.errors import ExitCode, PolicylineError

app = typer.Typer(
    name="policyline",
    help="Moves LoRA policy versions from one RL trainer to a fleet of vLLM servers, and proves "
    "afterwards who served what.",
    epilog="Try it: policyline demo --engine sim",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"policyline {importlib.metadata.version('policyline')}")
        raise typer.Exit


@app.callback()
def root(
    verbose: VerboseOption = 0,
    log_format: LogFormatOption = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show and exit."),
    ] = False,
) -> None:
    """Options before a command's name."""


add_command(app, demo.demo, "policyline demo --engine sim --versions 20")
add_command(
    app, publish.publish, "policyline publish out/checkpoint-40 --run grpo-7 --metadata step=40"
)
add_command(app, sidecar.sidecar, sidecar.EPILOG)
add_command(app, router.router, router.EPILOG)
add_command(app, doctor.doctor, doctor.EPILOG)
app.add_typer(ledger.app, name="ledger")


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_reporting(app))


def run_reporting(app: typer.Typer) -> int:
    """Run the command line; return the exit code, with a known error as one line on stderr."""
    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.DONE
    except PolicylineError as error:
        return _report(error, error.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _report(error, ExitCode.UNREACHABLE)
    return ExitCode.DONE


def _report(error: Exception, code: ExitCode) -> ExitCode:
    text = " ".join(str(error).split())
    sys.stderr.write(f"policyline: {visible(text)}\n")
    return code
