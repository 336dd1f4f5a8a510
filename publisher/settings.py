"""Where a trainer publishes to, and the bounds it keeps while it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.settings import RunSettings

_RULES = RunSettings()


@dataclass(frozen=True, slots=True)
class PublishTo:
    """Ledger, storage and run of a trainer. Times are in seconds."""

    ledger: str
    """`sqlite:///file.db`, a plain path, or `postgresql://user@host/name`."""
    storage: str
    """Directory, local or mounted, or its URL."""
    run: str
    """Name of the training run; it is opened, or gone on with when it is open already."""
    line: str = DEFAULT_LINE
    """Prefix of the versions' names."""
    parent_run: str | None = None
    """Run that a new run goes on from (a fork)."""
    parent_version: int | None = None
    """Version of the parent run; None takes the one that the checkpoint names, where it is the
    parent run's."""
    take_over: bool = False
    """Fence a publisher of the run that may still live, as when another host was preempted."""
    max_lora_rank: int | None = None
    """The servers' `--max-lora-rank`, to refuse a greater one before the first step."""
    servers: Mapping[str, str] = field(default_factory=dict)
    """Replica -> base URL for rollouts, where several servers are used without a router. Empty:
    all rollouts go to the trainer's `vllm_server_base_url`, a router or the line's only server."""
    min_ready: int | None = _RULES.min_ready
    """See `RunSettings`; the three count only when this opens the run."""
    ready_grace_s: float = _RULES.ready_grace_s
    candidate_timeout_s: float = _RULES.candidate_timeout_s
    ready_timeout_s: float = 300.0
    """How long training goes on, or waits, while nothing that was published becomes ready, or
    while ledger or storage are away. More than `candidate_timeout_s`, so that one version that
    nobody can serve does not end training."""
    ratio_tolerance: float = 0.05
    """A mean importance ratio further from 1 than this is flagged. On one server and one trainer
    it stays within 0.001 (published figures of the reference deployment: 0.9993 to 1.0004)."""
    probe_reference: bool | None = None
    """Score the probe's 16 tokens with the training model at every sync and record the values:
    one forward pass. None: where one process holds the model."""
    staging: Path | None = None
    """Local directory for saved adapters until they are published; None: `.policyline` in the
    trainer's output directory."""

    def rules(self, max_staleness: int) -> RunSettings:
        """Rules for the run if this opens it.

        Raises:
            SettingsInvalid: a value out of bounds.
        """
        return RunSettings(
            max_staleness=max_staleness,
            min_ready=self.min_ready,
            ready_grace_s=self.ready_grace_s,
            candidate_timeout_s=self.candidate_timeout_s,
        )
