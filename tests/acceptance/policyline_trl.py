"""stock_trl.py with policyline's trainer: MODEL OUTPUT STEPS LEDGER STORAGE RUN REPLICA=URL ..."""

from __future__ import annotations

import sys

from publisher.trl import AsyncGRPOTrainer, PublishTo
from tests.acceptance.stock_trl import train

if __name__ == "__main__":
    model, output, steps, ledger, storage, run, *pairs = sys.argv[1:]
    servers = dict(pair.split("=", 1) for pair in pairs)
    to = PublishTo(ledger=ledger, storage=storage, run=run, servers=servers)
    first = next(iter(servers.values()))
    train(AsyncGRPOTrainer, model, output, first, int(steps), publish_to=to)
