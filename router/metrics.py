"""Prometheus metrics of one router: plain numbers on a request's path, shaped when read."""

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
        """One more."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, text: str) -> Metric:
        """As Prometheus has it: cumulative."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(_PREFIX + name, text, buckets=buckets, sum_value=self._sum_s)


class Metrics(Collector):
    """What /metrics shows."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        """HTTP status -> answers; 499: the client left before the end."""
        self.refusals: Counter[str] = Counter()
        """Type of the error -> requests that no replica answered."""
        self.choices: Counter[str] = Counter()
        """Kind of the choice -> choices."""
        self.retries: Counter[str] = Counter()
        """Why -> requests that were sent to another replica."""
        self.noted = 0
        """Rollouts in the spool, ever."""
        self.queue_s = Durations()
        """From a request's arrival until it is sent to the replica that answers it."""
        self.answer_s = Durations()
        """From there to the end of the answer."""
        self._shown: list[tuple[str, str, Callable[[], float]]] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show a figure that is read when somebody looks."""
        self._shown.append((name, text, value))

    def collect(self) -> Iterable[Metric]:
        """Every family; called by the registry."""
        for name, text, value in self._shown:
            yield GaugeMetricFamily(_PREFIX + name, text, value=value())
        yield _counted("answers", "Answers; 499: the client left.", "status", self.answers)
        yield _counted("refusals", "Requests that no replica answered.", "type", self.refusals)
        yield _counted("choices", "Replicas chosen, by how.", "kind", self.choices)
        yield _counted("retries", "Requests sent to another replica.", "why", self.retries)
        yield CounterMetricFamily(_PREFIX + "rollouts_noted", "Rollouts noted.", value=self.noted)
        yield self.queue_s.family("queue_seconds", "From arrival until a replica was sent it.")
        yield self.answer_s.family("answer_seconds", "From there to the end of the answer.")

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


def _counted(name: str, text: str, label: str, counts: Counter[str] | Counter[int]) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for value, count in sorted(counts.items(), key=lambda item: str(item[0])):
        family.add_metric([str(value)], count)
    return family
