"""What metrics are made from, and how they are made into Prometheus' families."""

from collections.abc import Iterable, Mapping

from attrs import frozen
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvtrio.core.machine import CoreStatistics
from kvtrio.engine.records import CostRecord
from kvtrio.obs.tally import Spread, Tally

Labels = dict[str, str]
Values = Iterable[tuple[Labels, float]]


@frozen
class AdapterLabels:
    """One adapter that requests may name, and who uses it."""

    name: str
    digest: str
    num_running: int
    num_waiting: int


@frozen(kw_only=True)
class Snapshot:
    """What one answer is made of."""

    tally: Tally
    statistics: CoreStatistics
    cost: CostRecord
    block_size: int
    model: str
    adapters: tuple[AdapterLabels, ...]
    max_adapters: int
    now_s: float
    """Unix time."""


def counter(name: str, help_text: str, values: Values) -> Metric:
    """``name`` without "_total", which is added."""
    family = CounterMetricFamily(name, help_text)
    return _filled(family, f"{name}_total", values)


def gauge(name: str, help_text: str, values: Values) -> Metric:
    return _filled(GaugeMetricFamily(name, help_text), name, values)


def histogram(
    name: str, help_text: str, spread: Spread, labels: Mapping[str, str] | None = None
) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), buckets(spread), spread.total)
    return family


def buckets(spread: Spread) -> list[tuple[str, float]]:
    """Summed up, as Prometheus has them."""
    names = [*map(str, spread.bounds), "+Inf"]
    total, summed = 0, []
    for name, count in zip(names, spread.counts, strict=True):
        total += count
        summed.append((name, float(total)))
    return summed


def _filled(family: Metric, name: str, values: Values) -> Metric:
    for labels, value in values:
        family.add_sample(name, labels, value)
    return family


def one(value: float) -> Values:
    return [({}, value)]
