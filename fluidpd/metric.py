"""What FluidPD exports: the declaration of one metric, and a sheet that takes values for declared ones alone.

Never exports a number that is not known: its series is absent, so that an alert can tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, StateSetMetricFamily

OTHER = "other"  # a word that a closed set does not have: a newer peer's. It is counted, and makes no series of its own.
Kind = Literal["gauge", "counter", "histogram", "stateset"]
PHASE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TICK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric as it is documented. `labels`: each with its closed set; an empty set is open (a worker's name)."""

    name: str
    kind: Kind
    text: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = ""
    buckets: tuple[float, ...] = ()
    zeros: bool = False  # every series of it is there from the start, so that a rate sees the first event
    is_per_worker: bool = False

    def word(self, label: str, value: str) -> str:
        known = self.labels[label]
        return value if not known or value in known else OTHER


class Sheet:
    """Values of one scrape. Raises KeyError for a name or a label that is not declared."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._specs}
        self._families: dict[str, Metric] = {}

    def set(self, name: str, value: Any, **labels: str) -> None:
        """None, and what is no finite number, is left out. Words that a closed set lacks are added up as "other"."""
        number = number_of(value)
        spec = self._specs[name]
        if set(labels) != set(spec.labels):
            raise KeyError(f"{name} has the labels {', '.join(spec.labels) or 'none'}, not {', '.join(labels) or 'none'}")
        if number is None:
            return
        key = tuple(spec.word(label, labels[label]) for label in spec.labels)
        own = self._values[name]
        own[key] = number + (own[key] if key in own and OTHER in key else 0.0)

    def add(self, name: str, number: float, **labels: str) -> None:
        """As set, on top of what is there."""
        spec = self._specs[name]
        key = tuple(spec.word(label, labels[label]) for label in spec.labels)
        self._values[name][key] = self._values[name].get(key, 0.0) + number

    def count(self, name: str, label: str, counts: Mapping[str, float], **labels: str) -> None:
        """A counter by one label, from where it is counted."""
        for word, count in counts.items():
            self.set(name, count, **{label: word}, **labels)

    def put(self, name: str, family: Metric) -> None:
        """A family that was made elsewhere, a histogram."""
        assert name in self._specs
        self._families[name] = family

    def families(self) -> Iterator[Metric]:
        """In the order of the declaration. A metric without a value still says what it would be."""
        for name, spec in self._specs.items():
            yield self._families[name] if name in self._families else _family(spec, self._values[name])


def _family(spec: MetricSpec, values: Mapping[tuple[str, ...], float]) -> Metric:
    if spec.kind == "stateset":
        return _states(spec, values)
    if spec.kind == "histogram":
        return HistogramMetricFamily(spec.name, spec.text, labels=list(spec.labels))
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = make(spec.name, spec.text, labels=list(spec.labels))
    found = {**dict.fromkeys(_every(spec), 0.0), **values} if spec.zeros else values
    for key, value in found.items():
        family.add_metric(list(key), value)
    return family


def _states(spec: MetricSpec, values: Mapping[tuple[str, ...], float]) -> Metric:
    """The last label of a state set is the state; its values are 1 for the one that holds."""
    *labels, last = spec.labels
    family = StateSetMetricFamily(spec.name, spec.text, labels=labels)
    for *key, state in values:
        family.add_metric(key, {known: known == state for known in spec.labels[last]})
    return family


def _every(spec: MetricSpec) -> Iterator[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = [()]
    for words in spec.labels.values():
        keys = [(*key, word) for key in keys for word in words]
    yield from keys


def observed(spec: MetricSpec) -> Histogram:
    """A histogram of its own, in no registry: `collected` gives its family."""
    return Histogram(spec.name, spec.text, list(spec.labels), buckets=spec.buckets, registry=None)


def collected(histogram: Histogram) -> Metric:
    """Without the times at which its series began: a series more for each, of use to nobody here."""
    family = next(iter(histogram.collect()))
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family


def number_of(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
