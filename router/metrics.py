"""Prometheus metrics of one router, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BOUNDS_S: Final = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_PREFIX: Final = "policyline_router_"


class Metrics:
    """The metrics of /metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.answers = self._counter(
            "answers", "Answers by HTTP status; 499: the client disconnected.", "status"
        )
        self.refusals = self._counter(
            "refusals", "Requests that the router refused, by error code.", "type"
        )
        self.choices = self._counter("choices", "Replicas chosen, by kind of choice.", "kind")
        self.retries = self._counter(
            "retries", "Requests retried at another replica, by reason.", "why"
        )
        self.recorded = self._counter("rollouts_recorded", "Rollouts written to the spool.")
        self.queue_s = self._histogram(
            "queue_seconds", "From arrival until the request was sent to a replica."
        )
        self.answer_s = self._histogram("answer_seconds", "From there to the end of the answer.")

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge; `value` is called at each scrape."""
        Gauge(_PREFIX + name, text, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in the exposition format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=_BOUNDS_S, registry=self._registry)
