"""What a trainer and a watcher agree on about the probe: its tokens, and its keys in metadata."""

from __future__ import annotations

from typing import Final

PROBE_TOKENS: Final = (11, 87, 42, 151, 7, 203, 64, 128, 19, 230, 95, 176, 33, 222, 58, 140)
"""Token ids of the probe: the same on every replica, below every vocabulary's size, and short
enough for every context length."""
ZERO_INIT: Final = "zero_init"
"""Key in a manifest's metadata: true when the adapter is meant to change nothing yet (B = 0)."""
TRAINER_REFERENCE: Final = "probe_reference"
"""Key in a manifest's metadata: the trainer's own values for `PROBE_TOKENS`, one fewer."""
