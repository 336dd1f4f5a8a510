"""Settings of one replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from policyline.replay_into.records import Range


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is replayed, and how. Durations are in seconds."""

    run: str
    versions: Range = field(default_factory=Range)
    tolerance: float = 1e-3
    """Largest difference (natural log) of a probe from the one recorded on the same build."""
    max_size_bytes: int = 8 << 30
    """A version whose manifest claims more bytes is not copied."""
    engine_back_s: float = 300.0
    """How long to wait for a server that stopped answering: a restart takes a minute or two."""
