"""`policyline ledger ...`: ask the ledger."""

from __future__ import annotations

import typer

app = typer.Typer(help="Ask the ledger: who served what, when, and what came of it.")


@app.callback()
def _group() -> None:
    """Ask the ledger."""
