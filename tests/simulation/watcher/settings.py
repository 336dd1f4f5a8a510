"""What the simulated fleet is like: names, durations, sizes."""

from __future__ import annotations

from typing import Final

from policyline.ledger import RunSettings
from tests.simulation.watcher.process import LONGEST_CALL_S

REPLICAS: Final = ("r0", "r1")
TRAINER: Final = "trainer"
SLOTS: Final = 4
RUN: Final = RunSettings(max_staleness=2, ready_grace_s=3.0, candidate_timeout_s=60.0)
POLL_S: Final = 5.0
LINGER_S: Final = 2.0
GRACE_S: Final = 3.0
TTL_S: Final = 20.0
FETCH_TIMEOUT_S: Final = 8.0
STOP_TIMEOUT_S: Final = 6.0
WITHIN_S: Final = 2 * POLL_S + POLL_S + LONGEST_CALL_S + RUN.ready_grace_s + 2.0
"""I8: two observation periods, the back-off in force, a call that hung when the faults stopped, the
grace for a version that one replica has rejected, and two seconds for loads and probes."""
STEP_S: Final = 0.05
"""Of the double's decoding."""
WEIGHTS: Final = "adapter_model.safetensors"
