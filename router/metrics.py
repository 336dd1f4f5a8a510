"""Prometheus metrics of one router: plain counters, converted when they are scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_BOUNDS_S: Final = (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_PREFIX: Final = "policyline_router_"


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, text: str) -> Metric:
        """The histogram in Prometheus' cumulative form."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(_PREFIX + name, text, buckets=buckets, sum_value=self._sum_s)


class Metrics(Collector):
    """The metrics of /metrics."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        """HTTP status -> answers; 499: the client disconnected before the end."""
        self.refusals: Counter[str] = Counter()
        """Error code -> requests that the router refused."""
        self.choices: Counter[str] = Counter()
        """Kind of choice -> choices."""
        self.retries: Counter[str] = Counter()
        """Reason -> requests retried at another replica."""
        self.recorded = 0
        """Rollouts written to the spool since the start."""
        self.queue_s = Durations()
        """Seconds from a request's arrival until it is sent to the replica that answers it."""
        self.answer_s = Durations()
        """Seconds from there to the end of the answer."""
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge; `value` is called at each scrape."""
        self._gauges.append((name, text, value))

    def collect(self) -> Iterable[Metric]:
        """All metric families; called by the registry."""
        for name, text, value in self._gauges:
            yield GaugeMetricFamily(_PREFIX + name, text, value=value())
        yield _counted(
            "answers",
            "Answers by HTTP status; 499: the client disconnected.",
            "status",
            self.answers,
        )
        yield _counted(
            "refusals", "Requests that the router refused, by error code.", "type", self.refusals
        )
        yield _counted("choices", "Replicas chosen, by kind of choice.", "kind", self.choices)
        yield _counted(
            "retries", "Requests retried at another replica, by reason.", "why", self.retries
        )
        yield CounterMetricFamily(
            _PREFIX + "rollouts_recorded", "Rollouts written to the spool.", value=self.recorded
        )
        yield self.queue_s.family(
            "queue_seconds", "From arrival until the request was sent to a replica."
        )
        yield self.answer_s.family("answer_seconds", "From there to the end of the answer.")

    def text(self) -> bytes:
        """All metrics in the exposition format."""
        return generate_latest(self._registry)


def _counted(name: str, text: str, label: str, counts: Counter[str] | Counter[int]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for value, count in sorted(counts.items(), key=lambda item: str(item[0])):
        family.add_metric([str(value)], count)
    return family
