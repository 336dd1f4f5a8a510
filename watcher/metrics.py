"""Prometheus metrics of one sidecar, in a registry of its own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Mapping
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from policyline.watcher.core.model import Desired, Known, Pending, PendingReason

PHASES: Final = ("notice", "fetch", "verify", "load", "probe")
_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class SidecarMetrics:
    """What /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.resident = Gauge(
            "policyline_resident_versions",
            "Versions of the line that the engine lists from our copies.",
            registry=self.registry,
        )
        self.acked_versions = Gauge(
            "policyline_acked_versions",
            "Versions for which this replica's present incarnation holds an ack.",
            registry=self.registry,
        )
        self.lag = Gauge(
            "policyline_lag_versions",
            "How many versions the newest acked one is behind current; 0 when it is not.",
            registry=self.registry,
        )
        self.syncs_since_ack = Gauge(
            "policyline_syncs_since_ack",
            "How many versions the newest acked one is behind the newest desired one: nothing new "
            "was served here for so many syncs.",
            registry=self.registry,
        )
        self.engine_up = Gauge(
            "policyline_engine_up", "1 while the engine can be observed.", registry=self.registry
        )
        self.engine_hung = Gauge(
            "policyline_engine_hung",
            "1 while the engine's server answers and its worker does not.",
            registry=self.registry,
        )
        self.paused = Gauge(
            "policyline_engine_paused", "1 while generation is paused.", registry=self.registry
        )
        self.ledger_up = Gauge(
            "policyline_ledger_up", "1 while the ledger can be read.", registry=self.registry
        )
        self.acks = Counter(
            "policyline_acks", "Acks written to the ledger.", registry=self.registry
        )
        self.evictions = Counter(
            "policyline_evictions", "Versions unloaded from the engine.", registry=self.registry
        )
        self.freed = Counter(
            "policyline_freed",
            "Unloaded versions whose memory in the workers was freed.",
            registry=self.registry,
        )
        self.suspicious_probes = Counter(
            "policyline_suspicious_probes",
            "Acks with a note: the probe equals the base model's, or differs from the trainer's.",
            registry=self.registry,
        )
        self.errors = Counter(
            "policyline_errors",
            "Failed actions and observations.",
            ["error"],
            registry=self.registry,
        )
        self.phases = Histogram(
            "policyline_phase_seconds",
            "Duration of each phase of an acked version.",
            ["phase"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.pending = Gauge(
            "policyline_pending_versions",
            "Desired versions that are not served yet, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.set_pending(())
        for phase in PHASES:
            self.phases.labels(phase)

    def measure(self, desired: Desired, observed: Known) -> None:
        """Set what follows from an observation."""
        known = (*desired.wanted, *desired.out_of_window)
        self.resident.set(sum(observed.lists(v) for v in known))
        current = next((v.version for v in desired.wanted if v.role == "current"), 0)
        acked = [v.version for v in known if v.acked_by(observed.incarnation)]
        self.paused.set(bool(observed.paused))
        self.acked_versions.set(sum(v.acked_by(desired.incarnation) for v in known))
        newest = max((v.version for v in desired.wanted), default=0)
        self.syncs_since_ack.set(max(0, newest - max(acked, default=0)))
        self.lag.set(max(0, current - max(acked, default=0)))

    def set_pending(self, pending: Collection[Pending]) -> None:
        """Set how many versions wait, for each kind of reason."""
        tally = Tally(version.reason for version in pending)
        for reason in get_args(PendingReason):
            self.pending.labels(reason).set(tally[reason])

    def acked(self, phases: Mapping[str, float]) -> None:
        """Count an ack and its phases, in seconds."""
        self.acks.inc()
        for phase, seconds in phases.items():
            self.phases.labels(phase).observe(seconds)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
