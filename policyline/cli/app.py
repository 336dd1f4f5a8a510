"""The root command. One module per verb; each adds itself to `app`."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from policyline.cli import demo, doctor, ledger, publish, router, sidecar
from policyline.cli.command import LogFormatOption, VerboseOption
from policyline.cli.failure import run_reporting

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


demo.add_to(app)
publish.add_to(app)
sidecar.add_to(app)
router.add_to(app)
doctor.add_to(app)
app.add_typer(ledger.app, name="ledger")


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_reporting(app))
