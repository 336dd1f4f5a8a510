"""The settings of a trainer that publishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from policyline.ledger.names import DEFAULT_LINE
from policyline.ledger.settings import RunSettings


@dataclass(frozen=True, slots=True)
class PublishTo:
    """Where a trainer publishes, and how long it waits for the servers.

    Names ending in `_s` are in seconds.
    """

    ledger: str
    """The ledger: a path or `sqlite:///file.db` for SQLite, `postgresql://user@host/name` for
    Postgres."""
    storage: str
    """The storage: a directory, local or mounted, or a URL."""
    run: str
    """Name of the training run. It is opened, or continued when it is open already."""
    line: str = DEFAULT_LINE
    """Prefix of the versions' names, `<line>-v<version>`."""
    parent_run: str | None = None
    """The run that a new run continues from (a fork); None for none."""
    parent_version: int | None = None
    """The version of the parent run that a new run continues from. None takes the version that the
    checkpoint names, if it belongs to the parent run."""
    take_over: bool = False
    """Claim the run even if another publisher may be alive, for example on a preempted host. That
    one can publish no more."""
    max_lora_rank: int | None = None
    """The servers' `--max-lora-rank`; a higher rank is refused before the first step. None when not
    known."""
    servers: Mapping[str, str] = field(default_factory=dict)
    """Replica -> base URL for rollouts, where several servers are used without a router. Empty: all
    rollouts go to the trainer's `vllm_server_base_url`, a router or the line's only server."""
    min_ready: int | None = 1
    """A version is ready when all replicas serve it, or when this many do and `ready_grace_s` is
    over. None: only when all do. Used only when this opens the run, as are the next two."""
    ready_grace_s: float = 5.0
    """How long to wait for the other replicas after the first one serves a version."""
    candidate_timeout_s: float = 120.0
    """A version that is not ready within this time is withdrawn, and the next one follows."""
    ready_timeout_s: float = 300.0
    """Training stops after this time in which nothing published became ready, or ledger or storage
    were unavailable. It should be more than `candidate_timeout_s`, so that one version that cannot
    be served does not stop training."""
    ratio_tolerance: float = 0.05
    """A version is flagged when the mean importance ratio of its steps is further from 1 than this.
    With one server and one trainer it stays within 0.001 (published figures of the reference
    deployment: 0.9993 to 1.0004)."""
    probe_reference: bool | None = None
    """Whether to score the probe's 16 tokens with the training model at each sync, in one forward
    pass, and record the values. The replicas compare theirs with them. None: only where one
    process holds the whole model."""
    staging: Path | None = None
    """Local directory for saved adapters until they are published. None: `.policyline` in the
    trainer's output directory."""

    def rules(self, max_staleness: int) -> RunSettings:
        """The rules of the run, if this opens it.

        Args:
            max_staleness: how many versions, besides the current one, stay served.

        Raises:
            SettingsInvalid: a value is out of bounds.
        """
        return RunSettings(
            max_staleness=max_staleness,
            min_ready=self.min_ready,
            ready_grace_s=self.ready_grace_s,
            candidate_timeout_s=self.candidate_timeout_s,
        )
