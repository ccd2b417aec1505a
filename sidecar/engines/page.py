"""Prometheus text pages, read without lying: under which name a reading was found, what was rejected, and what is not there.

Never takes a role from a label, and never turns a page that could not be read into zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fluidpd.names import Role, UnknownWhy
from fluidpd.telemetry import BOUNDS, Bounds, ConfirmedIdle, Known, Reading, Unknown, judge
from sidecar.engines.loads import Unreadable

# The newest naming first. Where a worker shows two with different values, the newer is right and the older is a leftover.
NAMES: Mapping[str, tuple[str, ...]] = {
    "kv_share": ("sglang:token_usage", "sglang:full_token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "waiting": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    "kv_capacity_tokens": ("sglang:max_total_num_tokens",),
    "kv_used_tokens": ("sglang:num_used_tokens", "sglang:kv_used_tokens"),
    "context_tokens": ("sglang:decode_sum_seq_lens",),
    "bootstrap_queue": ("sglang:num_prefill_bootstrap_queue_reqs",),
    "inflight_queue": ("sglang:num_prefill_inflight_queue_reqs",),
    "prealloc_queue": ("sglang:num_decode_prealloc_queue_reqs",),
    "transfer_queue": ("sglang:num_decode_transfer_queue_reqs",),
    "generated_tokens_total": ("sglang:generation_tokens_total", "vllm:generation_tokens_total"),
    "prefilled_tokens_total": ("sglang:prompt_tokens_total", "vllm:prompt_tokens_total"),
}
_LATENCIES = {
    "ttft_s": ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "tbt_s": ("sglang:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
}
_KV_SHARE = Bounds(1.05, clamp_to=1.0)
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?\s*(\S*)(?:\s+-?\d+)?\s*$")
_WANTED = re.compile(r"^(?:sglang|vllm):")


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: Any  # a float, or the text where it is not a number


@dataclass(frozen=True, slots=True)
class Page:
    """A page by metric name."""

    series: Mapping[str, tuple[Series, ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """Readings of one page, by reading name, with the metric each came from."""

    readings: Mapping[str, Reading]
    matched: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def parse_page(body: str, status: int = 200) -> Page:
    """Raises Unreadable for an error status, an empty body, an HTML page, and a page without one metric of an engine."""
    if status != 200:
        raise Unreadable(f"/metrics answered HTTP {status}")
    if not body.strip():
        raise Unreadable("/metrics answered an empty page")
    if body.lstrip().startswith("<"):
        raise Unreadable("/metrics answered an HTML page")
    lines = [text for text in body.splitlines() if _WANTED.match(text)]
    if not lines:
        raise Unreadable("/metrics has no sglang: or vllm: metric")
    series: dict[str, list[Series]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                series.setdefault(sample.name, []).append(Series(sample.labels, sample.value))
    except ValueError:
        # One bad line stops the library's parser; here it must cost no more than its own metric.
        series = {}
        for text in lines:
            match = _LINE.match(text)
            if match:
                series.setdefault(match[1], []).append(Series(_labels(match[2] or ""), _value(match[3])))
    return Page({name: tuple(found) for name, found in series.items()})


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _labels(text: str) -> dict[str, str]:
    return dict(re.findall(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"', text))


def read_page(page: Page, at_s: float) -> Found:
    """Judge every reading on its own: one that is bad or missing costs no other."""
    readings: dict[str, Reading] = {}
    matched: dict[str, str] = {}
    notes: list[str] = []
    for reading, names in NAMES.items():
        bounds = _KV_SHARE if reading == "kv_share" else BOUNDS[reading]
        judged = {name: _judged(page.series[name], reading, bounds, at_s) for name in names if name in page.series}
        if not judged:
            readings[reading] = Unknown(UnknownWhy.MISSING)
            notes.append(f"{reading} is not on the page; tried {', '.join(names)}")
            continue
        name, result = next(iter(judged.items()))
        readings[reading] = result
        matched[reading] = name
        if isinstance(result, Unknown):
            notes.append(f"{name} rejected: {result.why}")
        elif isinstance(result, Known) and result.flagged:
            notes.append(f"{name} was above its bound and is used as {result.value:g}")
        for other, second in list(judged.items())[1:]:
            if isinstance(second, Known) and isinstance(result, Known) and second.value != result.value:
                notes.append(
                    f"{name} and {other} differ ({result.value:g} and {second.value:g}); {name} is the newer name and is used"
                )
    return Found(readings, matched, tuple(notes))


def _judged(series: tuple[Series, ...], reading: str, bounds: Bounds, at_s: float) -> Reading:
    values: list[float] = []
    for one in series:
        result = judge(one.value, bounds, at_s)
        if not isinstance(result, Known):
            return result
        if result.flagged:
            return result
        values.append(result.value)
    # Ranks add up in counts; a share is as bad as its worst rank.
    return Known(max(values) if reading == "kv_share" else sum(values), at_s)


def mean_latency(before: Page | None, after: Page, which: str, at_s: float) -> Reading:
    """The mean of a latency over the requests that ended between two pages; confirmed idle where none did and none is at work."""
    names = _LATENCIES[which]
    name = next((n for n in names if f"{n}_count" in after.series), None)
    if name is None:
        return Unknown(UnknownWhy.MISSING)
    if before is None or f"{name}_count" not in before.series:
        return Unknown(UnknownWhy.WARMING, at_s)
    totals = [_counter(page, f"{name}_{part}", at_s) for page in (before, after) for part in ("count", "sum")]
    for total in totals:
        if not isinstance(total, Known):
            return total
    count0, sum0, count1, sum1 = (t.value for t in totals if isinstance(t, Known))
    if count1 < count0 or sum1 < sum0:
        return Unknown(UnknownWhy.COUNTER_RESET, at_s)
    if count1 > count0:
        return Known((sum1 - sum0) / (count1 - count0), at_s)
    found = read_page(after, at_s).readings
    at_rest = all(isinstance(found[n], Known) and found[n] == Known(0.0, at_s) for n in ("running", "waiting"))
    return ConfirmedIdle(at_s) if at_rest else Unknown(UnknownWhy.MISSING)


def _counter(page: Page, name: str, at_s: float) -> Reading:
    return _judged(page.series[name], name, Bounds(1e15), at_s) if name in page.series else Unknown(UnknownWhy.MISSING)


def label_disagreement(page: Page, role: Role | None) -> str | None:
    """Says so where the engine_type label names the other role. "unified" and "dynamic" name none, and disagree with none."""
    said = {one.labels.get("engine_type") for series in page.series.values() for one in series} & set(Role)
    if role is not None and said == {role.other}:
        return f"the engine_type label says {role.other}, the engine itself says {role}: the engine is right"
    return None
