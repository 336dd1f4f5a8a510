"""Prometheus metrics of one router, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS_S: Final = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """What /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "policyline_router_answers",
            "Answers by HTTP status; 499: the client left before its end.",
            ["status"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "policyline_router_refusals",
            "Requests that no replica answered, by the answer's type.",
            ["type"],
            registry=self.registry,
        )
        self.choices = Counter(
            "policyline_router_choices",
            "Replicas chosen: matched, spilled or unmatched.",
            ["kind"],
            registry=self.registry,
        )
        self.retries = Counter(
            "policyline_router_retries",
            "Requests sent to another replica: unreachable, broken, or denied by the engine.",
            ["why"],
            registry=self.registry,
        )
        self.queue_s = Histogram(
            "policyline_router_queue_seconds",
            "From a request's arrival until it was sent to the replica that answered it.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.answer_s = Histogram(
            "policyline_router_answer_seconds",
            "From there to the end of the answer.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.noted = Counter(
            "policyline_router_rollouts_noted", "Rollouts noted.", registry=self.registry
        )

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show a figure that is read when somebody looks."""
        Gauge(f"policyline_router_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
