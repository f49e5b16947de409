"""Metrics of one process, and the only importer of prometheus_client.

Invariant: only names and labels of `metric_schema` are exported, and no metric grows past `MAX_SERIES`
label combinations, so a label that turns out unbounded costs memory for neither us nor Prometheus. Daemons
make one `Metrics`, pass it down, and the HTTP pages render it.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from astraflow_kit.metric_schema import SCHEMA, Kind, Metric
from astraflow_kit.nearest import did_you_mean

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_SERIES = 1000
OVERFLOW = "other"

M = TypeVar("M", Counter, Gauge, Histogram)


class Metrics:
    """The registry of one process. Thread-safe. Undeclared names raise KeyError, wrong labels ValueError."""

    def __init__(self, schema: Mapping[str, Metric] = SCHEMA) -> None:
        self._schema = schema
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._seen: dict[str, set[tuple[str, ...]]] = {name: set() for name in schema}
        for entry in schema.values():
            self._export(entry)
        ProcessCollector(registry=self._registry)

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add `amount` (at least 0) to a counter."""
        self._series(self._counters, name, labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._series(self._gauges, name, labels).set(value)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Move a gauge by `amount`, up or down."""
        self._series(self._gauges, name, labels).inc(amount)

    def replace(self, name: str, values: Mapping[tuple[str, ...], float], **fixed: str) -> None:
        """Set those series of a gauge that have the labels `fixed`, and drop the others of them that it has.

        `values` is by the values of its further labels, in the schema's order.
        """
        further = [label for label in self._schema[name].labels if label not in fixed]
        wanted = [dict(zip(further, key, strict=True)) | fixed for key in values]
        kept = {tuple(labels[label] for label in self._schema[name].labels) for labels in wanted}
        self._drop(name, [series for series in self._having(name, fixed) if series not in kept])
        for labels, value in zip(wanted, values.values(), strict=True):
            self.set(name, value, **labels)

    def forget(self, **labels: str) -> None:
        """Drop the series with these labels of every metric that has them: what they are about is no more."""
        for name, entry in self._schema.items():
            if labels.keys() <= set(entry.labels):
                self._drop(name, self._having(name, labels))

    def observe(self, name: str, *values: float, **labels: str) -> None:
        """Record values in a histogram, in the unit its name ends with."""
        series = self._series(self._histograms, name, labels)
        for value in values:
            series.observe(value)

    def render(self) -> bytes:
        """The Prometheus text format; its media type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _export(self, entry: Metric) -> None:
        name, about, labels, registry = entry.name, entry.help, entry.labels, self._registry
        if entry.kind is Kind.COUNTER:
            self._counters[name] = Counter(name, about, labels, registry=registry)
        elif entry.kind is Kind.GAUGE:
            self._gauges[name] = Gauge(name, about, labels, registry=registry)
        else:
            self._histograms[name] = Histogram(name, about, labels, registry=registry, buckets=entry.buckets)

    def _having(self, name: str, labels: Mapping[str, str]) -> list[tuple[str, ...]]:
        places = [(self._schema[name].labels.index(label), value) for label, value in labels.items()]
        return [series for series in self._seen[name] if all(series[at] == value for at, value in places)]

    def _drop(self, name: str, series: Iterable[tuple[str, ...]]) -> None:
        family = self._counters.get(name) or self._gauges.get(name) or self._histograms[name]
        for values in series:
            family.remove(*values)
            self._seen[name].discard(values)

    def _series(self, family: Mapping[str, M], name: str, labels: Mapping[str, str]) -> M:
        if name not in family:
            raise KeyError(f"metric {name!r} is not declared as this kind. {did_you_mean(name, family)}")
        declared = self._schema[name].labels
        if labels.keys() != set(declared):
            raise ValueError(f"metric {name!r} has labels {sorted(declared)}, not {sorted(labels)}")
        if not declared:
            return family[name]
        values = tuple(labels[label] for label in declared)
        seen = self._seen[name]
        if values not in seen and len(seen) >= MAX_SERIES:
            values = (OVERFLOW,) * len(values)
        seen.add(values)
        return family[name].labels(*values)
