"""`policyline ledger ...`: change and ask the ledger. One module per verb, or for a few of them."""

from __future__ import annotations

import typer

from policyline.cli.command import add_command
from policyline.cli.ledger import (
    admin,
    audit,
    history,
    replay,
    rollouts,
    show,
    status,
    transfer,
    versions,
)

app = typer.Typer(
    help="Ask the ledger who served what and when; prepare and steer it.",
    epilog="Example: policyline ledger status --ledger run.db",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
for name, function, example in (
    ("upgrade", admin.upgrade, "policyline ledger upgrade --ledger run.db"),
    ("open-run", admin.open_run, "policyline ledger open-run grpo-7 --max-staleness 4"),
    ("close-run", admin.close_run, "policyline ledger close-run grpo-7"),
    ("pin", admin.pin, "policyline ledger pin 12 --serve"),
    ("unpin", admin.unpin, "policyline ledger unpin 12"),
    ("retry", admin.retry, "policyline ledger retry 12 --replica gpu-3"),
    ("withdraw", admin.withdraw, 'policyline ledger withdraw 12 --reason "reward collapsed"'),
    ("rollback", admin.rollback, 'policyline ledger rollback --to 12 --reason "reward collapsed"'),
    ("pause", admin.pause, 'policyline ledger pause --reason "node maintenance"'),
    ("resume", admin.resume, "policyline ledger resume --ledger run.db"),
    ("runs", show.runs, "policyline ledger runs --ledger run.db"),
    ("versions", versions.versions, "policyline ledger versions --run grpo-7 --json"),
    ("phases", show.phases, "policyline ledger phases --run grpo-7"),
    ("status", status.status, "policyline ledger status --ledger run.db --watch"),
    ("audit", audit.audit_version, "policyline ledger audit 7 --ledger run.db"),
    ("events", history.events, "policyline ledger events --from 100 --json"),
    ("as-of", history.show_as_of, "policyline ledger as-of 2026-01-31T12:00:00Z --ledger run.db"),
    ("verify", history.verify_ledger, "policyline ledger verify --ledger run.db"),
    ("replay", replay.replay_run, replay.EPILOG),
    (
        "rollouts",
        rollouts.rollouts,
        "policyline ledger rollouts --version 12 --replica r0 --format csv > r.csv",
    ),
    ("export", transfer.export_ledger, "policyline ledger export run.jsonl --ledger run.db"),
    (
        "import",
        transfer.import_ledger,
        "policyline ledger import run.jsonl --ledger postgresql://me@host/run",
    ),
    (
        "repair-projections",
        transfer.repair,
        "policyline ledger repair-projections --ledger run.db",
    ),
):
    add_command(app, function, example, name=name)
