"""Settings of one router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from policyline.errors import SettingsInvalid
from policyline.ledger.names import DEFAULT_LINE, check_line


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one router; durations in seconds."""

    line: str = DEFAULT_LINE
    """The line that it serves."""
    spool: Path = Path("policyline-spool")
    """Directory for rollouts that the ledger does not have yet, on a local disk; one router uses
    it."""
    alias: str = DEFAULT_LINE
    """The model name that means current, for harnesses with one fixed name."""
    pin_ttl_s: float = 3600.0
    """A session that sent nothing for so long is forgotten, and its next request means current."""
    ready_wait_s: float = 30.0
    """How long a request waits for a version that is published but not acked, or for a slot."""
    spill: int = 16
    """How many requests the holder of a prefix may be ahead of the least loaded replica: two groups
    of eight. In `benchmarks/routing.py` 8 spills 1 % of the requests, 6 already 3 %."""
    max_blocks: int = 400_000
    """Prefix blocks that are remembered, of all versions: about 60 MB."""
    min_ready: int = 1
    """Replicas that must serve current for /health to be 200."""
    max_in_flight: int = 4096
    """Requests at replicas at once; more are answered 503."""
    max_body_bytes: int = 64 << 20
    """A longer request is answered 413."""
    connect_timeout_s: float = 3.0
    """For a connection to a replica."""
    read_timeout_s: float = 600.0
    """Between two parts of an answer; without streaming the first is the whole generation."""
    drain_timeout_s: float = 60.0
    """After SIGTERM requests in flight may go on for so long."""
    poll_interval_s: float = 2.0
    """The longest time between two reads of the ledger."""
    ship_interval_s: float = 1.0
    """Between two batches of rollouts to the ledger."""
    mark_s: float = 10.0
    """An engine that denied an acked version is not asked for it for so long, or until its watcher
    acks again."""

    def __post_init__(self) -> None:
        check_line(self.line)
        for name in (
            "pin_ttl_s",
            "connect_timeout_s",
            "read_timeout_s",
            "poll_interval_s",
            "ship_interval_s",
            "mark_s",
            "max_blocks",
            "min_ready",
            "max_in_flight",
            "max_body_bytes",
        ):
            if not getattr(self, name) > 0:
                raise SettingsInvalid(f"{name} {getattr(self, name)} is not above 0")
        for name in ("ready_wait_s", "spill", "drain_timeout_s"):
            if not getattr(self, name) >= 0:
                raise SettingsInvalid(f"{name} {getattr(self, name)} is negative")
        if not self.alias:
            raise SettingsInvalid("an alias without a name is no alias")
