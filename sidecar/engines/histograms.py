"""Latency histograms of a worker's page: means and quantiles of the requests between two pages, as far as buckets can tell.

Never invents a number: a quantile beyond the last finite bound is "more than that bound", and a histogram that contradicts itself
is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fluidpd.names import UnknownWhy
from fluidpd.telemetry import Bounds, Known, Unknown, judge
from sidecar.engines.exposition import Page, Series

LATENCIES: Mapping[str, tuple[str, ...]] = {
    "ttft_s": ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "tbt_s": ("sglang:inter_token_latency_seconds", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
}
_COUNTER = Bounds(1e15)


def parts(name: str) -> tuple[str, str, str]:
    return f"{name}_bucket", f"{name}_sum", f"{name}_count"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound in seconds, the last one infinite: over all label sets, at the bounds common to all."""

    source: str
    count: float
    sum_s: float
    buckets: Mapping[float, float] = field(default_factory=dict)  # empty: the page has count and sum only, or its buckets are bad
    bad_why: str = ""

    def up_to(self, bound_s: float) -> float | None:
        """Observations at or below a bound; None where there is no bucket that ends there."""
        return self.buckets.get(bound_s)


@dataclass(frozen=True, slots=True)
class Quantile:
    """Where a quantile lies. `value_s` is interpolated within one bucket; None: above `above_s`, and nobody knows how far."""

    value_s: float | None
    above_s: float = 0.0

    def __str__(self) -> str:
        return f"> {self.above_s:g} s" if self.value_s is None else f"{self.value_s:.4g} s"


def histogram(page: Page, which: str) -> Histogram | Unknown:
    """The histogram of `which` (ttft_s, tbt_s) on this page."""
    for name in LATENCIES[which]:
        if (counts := page.spelled(f"{name}_count")) is None:
            continue
        source = counts.removesuffix("_count")
        count, total = (_sum(page.series.get(f"{source}_{part}", ())) for part in ("count", "sum"))
        if isinstance(count, Unknown) or isinstance(total, Unknown):
            return count if isinstance(count, Unknown) else total if isinstance(total, Unknown) else Unknown(UnknownWhy.MISSING)
        buckets, why = added_up(page.series.get(f"{source}_bucket", ()), count)
        return Histogram(source, count, total, buckets, why)
    return Unknown(UnknownWhy.MISSING)


def _sum(series: Iterable[Series]) -> float | Unknown:
    total, found = 0.0, False
    for one in series:
        result = judge("" if isinstance(one.value, str) else one.value, _COUNTER, 0.0)
        if not isinstance(result, Known):
            return result if isinstance(result, Unknown) else Unknown(UnknownWhy.NOT_A_NUMBER)
        total, found = total + result.value, True
    return total if found else Unknown(UnknownWhy.MISSING)


def added_up(series: Iterable[Series], count: float | None) -> tuple[dict[float, float], str]:
    """Buckets over all label sets, at the bounds common to all. Empty, with the reason, where the numbers contradict each other.

    `count` None: of a page whose own count was not read; then the last bucket tells it.
    """
    by_labels: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    for one in series:
        bound = _bound(one.labels.get("le"))
        value = judge("" if isinstance(one.value, str) else one.value, _COUNTER, 0.0)
        if bound is None or not isinstance(value, Known):
            return {}, f"the bucket le={one.labels.get('le')!r} cannot be read"
        key = tuple(sorted((k, v) for k, v in one.labels.items() if k != "le"))
        own = by_labels.setdefault(key, {})
        if bound in own and own[bound] != value.value:
            return {}, f"two buckets end at {bound:g}"
        own[bound] = value.value
    if not by_labels:
        return {}, ""
    common = set.intersection(*(set(own) for own in by_labels.values()))
    found = {bound: sum(own[bound] for own in by_labels.values()) for bound in sorted(common)}
    if count is None:
        if math.inf not in found:
            return {}, "there is no last bucket"
        count = found[math.inf]
    found.setdefault(math.inf, count)
    if found[math.inf] != count:
        return {}, f"the last bucket has {found[math.inf]:g}, the count is {count:g}"
    values = list(found.values())
    if any(b < a for a, b in itertools.pairwise(values)):
        return {}, "the buckets do not rise"
    return found, ""


def _bound(text: str | None) -> float | None:
    try:
        bound = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return None if math.isnan(bound) or bound == -math.inf else bound


def between(before: Histogram, after: Histogram) -> Histogram | Unknown:
    """What was observed between two pages of one process. A counter that fell, or another source, is a reset."""
    if after.source != before.source or after.count < before.count or after.sum_s < before.sum_s - 1e-9:
        return Unknown(UnknownWhy.COUNTER_RESET)
    common = [bound for bound in after.buckets if bound in before.buckets]
    buckets = {bound: after.buckets[bound] - before.buckets[bound] for bound in common}
    values = list(buckets.values())
    if any(v < 0 for v in values):
        return Unknown(UnknownWhy.COUNTER_RESET)
    is_sound = all(b >= a for a, b in itertools.pairwise(values))
    why = after.bad_why or before.bad_why or ("" if is_sound else "the buckets were not read at one moment")
    grown = max(0.0, after.sum_s - before.sum_s)
    return Histogram(after.source, after.count - before.count, grown, buckets if is_sound else {}, why)


def quantile(of: Histogram, share: float) -> Quantile | Unknown:
    """By linear interpolation within the bucket, as Prometheus does it; but never the last bound for what is above it."""
    if not of.buckets:
        return Unknown(UnknownWhy.MISSING)
    if of.count <= 0:
        return Unknown(UnknownWhy.MISSING)
    rank, low_s, below = share * of.count, 0.0, 0.0
    for bound_s, upto in of.buckets.items():
        if upto >= rank and upto > 0:
            if bound_s == math.inf:
                return Quantile(None, low_s)
            if bound_s <= 0 or upto == below:
                return Quantile(max(0.0, bound_s))
            return Quantile(low_s + (bound_s - low_s) * max(0.0, rank - below) / (upto - below))
        low_s, below = max(0.0, bound_s), upto
    return Unknown(UnknownWhy.MISSING)  # the buckets end below the count: it was not read at one moment


def mean(of: Histogram) -> float | None:
    return of.sum_s / of.count if of.count > 0 else None
