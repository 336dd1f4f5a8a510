"""Settings of one sidecar."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from policyline.errors import SettingsInvalid
from policyline.ledger.names import DEFAULT_LINE, check_label, check_line
from policyline.watcher.vllm.client import check_base_url


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Settings of one sidecar; durations in seconds."""

    replica: str
    """Name of this vLLM server in the ledger; unique within the line."""
    cache: Path
    """Directory for local copies, on a disk that vLLM reads under the same path. One sidecar
    uses it."""
    line: str = DEFAULT_LINE
    """The line to serve."""
    listen_host: str = "127.0.0.1"
    """Where /healthz, /readyz, /status and /metrics are served; they show no secrets, but take no
    key either."""
    listen_port: int = 9109
    """0 takes a free port and logs it."""
    poll_interval_s: float = 5.0
    """The observation period: the longest time without an observation of ledger and engine, and the
    cap of every back-off."""
    linger_s: float = 2.0
    """How long a version out of the window stays loaded for requests that were on their way."""
    grace_s: float = 10.0
    """How long local files stay at least after the engine showed no request on an unloaded
    version."""
    heartbeat_s: float = 2.0
    """Between two heartbeats."""
    ttl_s: float = 15.0
    """A replica whose heartbeat stands still for so long is lost: seven missed beats."""
    stop_timeout_s: float = 10.0
    """How long the action in hand may go on after SIGTERM."""
    fetch_timeout_s: float = 300.0
    """Longest copy of one version from storage; then others get their turn."""
    max_size_bytes: int = 8 << 30
    """A version whose manifest claims more is rejected before a byte is copied."""
    cache_limit_bytes: int | None = None
    """The most that the local copies may take. What vLLM may read again is never deleted for it:
    a version that does not fit is not fetched. None: as much as the disk holds."""
    probe_tolerance: float = 1e-3
    """Largest difference (natural log) between this probe and the first replica's on the same
    engine build. Two CPU servers of one build differ by 0.0, neighbouring versions by 0.4."""
    probe_interval_s: float = 30.0
    """The longest time without a scored request that shows that the engine generates; a call that
    was not answered in time is followed by one at once."""
    probe_timeout_s: float = 30.0
    """An engine that neither answers such a request nor does a step for so long hangs."""
    reference_tolerance: float = 0.1
    """Largest mean difference (natural log) between a probe and the trainer's own values before
    it is warned about; noise is up to 0.03, another policy 0.2 and more."""
    advertise: str | None = None
    """URL at which routers reach the engine; None: the one at which the sidecar does."""
    replace: bool = False
    """Replace a running sidecar of the same replica."""
    take_over: bool = False
    """Remove adapters that this ledger did not load but whose names it needs."""

    def __post_init__(self) -> None:
        check_line(self.line)
        check_label("replica", self.replica)
        self._check_durations()
        if self.cache_limit_bytes is not None and self.cache_limit_bytes <= 0:
            raise SettingsInvalid(f"a cache limit of {self.cache_limit_bytes} bytes holds nothing")
        if self.ttl_s < 2 * self.heartbeat_s:
            raise SettingsInvalid(
                f"a ttl of {self.ttl_s:g} s is below two heartbeats of {self.heartbeat_s:g} s",
                hint="raise --ttl or lower --heartbeat",
            )
        if self.advertise is not None:
            try:
                check_base_url(self.advertise)
            except ValueError as error:
                raise SettingsInvalid(f"advertise: {error}") from error

    def _check_durations(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingsInvalid(f"{field.name} {value} is not a finite number")
        for name in (
            "poll_interval_s",
            "heartbeat_s",
            "ttl_s",
            "stop_timeout_s",
            "probe_interval_s",
            "probe_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise SettingsInvalid(f"{name} {getattr(self, name)} is not above 0")
        for name in ("linger_s", "grace_s"):
            if getattr(self, name) < 0:
                raise SettingsInvalid(f"{name} {getattr(self, name)} is negative")
