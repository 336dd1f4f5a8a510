"""`policyline ledger ...`: change and ask the ledger."""

from __future__ import annotations

import typer

from policyline.cli.ledger import admin, history, replay, rollouts, show, status, transfer

app = typer.Typer(
    help="Ask the ledger who served what and when; prepare and steer it.",
    epilog="Example: policyline ledger status --ledger run.db",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
admin.add_to(app)
show.add_to(app)
status.add_to(app)
history.add_to(app)
replay.add_to(app)
rollouts.add_to(app)
transfer.add_to(app)
