"""A worker's metrics page as readings: under which name each was found, what was rejected and why, and what is not there.

Never takes a role from a label, and never turns a page that could not be read into zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluidpd.names import PageTrouble, Role, UnknownWhy
from fluidpd.telemetry import BOUNDS, Bounds, ConfirmedIdle, Known, Reading, Unknown, judge
from sidecar.engines.exposition import Page, Series, spellings
from sidecar.engines.exposition import parse_page as parse
from sidecar.engines.histograms import LATENCIES, between, histogram, mean, parts

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
WANTED = frozenset(
    (*(n for names in NAMES.values() for n in names), *(p for names in LATENCIES.values() for n in names for p in parts(n)))
)
_KV_SHARE = Bounds(1.05, clamp_to=1.0)
# Ranks that hold the same requests: each says the same of them, a moment apart. Data-parallel ranks hold requests of their own.
COPIES = frozenset(("tp_rank", "pp_rank", "moe_ep_rank", "attn_tp_rank", "attn_cp_rank"))


@dataclass(frozen=True, slots=True)
class Found:
    """Readings of one page, by reading name, with the metric each came from."""

    readings: Mapping[str, Reading]
    matched: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rejected: Mapping[str, int] = field(default_factory=dict)  # by the value of a PageTrouble or an UnknownWhy


def parse_page(body: str | bytes, status: int = 200, also: frozenset[str] = frozenset()) -> Page:
    """What FluidPD reads, and `also`. Raises Unreadable as exposition.parse_page says."""
    return parse(body, status, WANTED | also)


def read_page(page: Page, at_s: float) -> Found:
    """Judge every reading on its own: one that is bad or missing costs no other."""
    readings: dict[str, Reading] = {}
    matched: dict[str, str] = {}
    notes: list[str] = []
    rejected: Counter[str] = Counter({trouble.value: count for trouble, count in page.rejected.items()})
    for reading, names in NAMES.items():
        bounds = _KV_SHARE if reading == "kv_share" else BOUNDS[reading]
        spelled = [s for name in names for s in spellings(name) if s in page.series]
        if not spelled:
            readings[reading] = Unknown(UnknownWhy.MISSING)
            notes.append(f"{reading} is not on the page; tried {', '.join(names)}")
            continue
        judged = {name: _reduced(page.series[name], reading, bounds, at_s) for name in spelled}
        name, result = next(iter(judged.items()))
        readings[reading] = result
        matched[reading] = name
        if isinstance(result, Unknown):
            if result.why is not UnknownWhy.NOT_A_NUMBER:  # that is a malformed line, and counted as one
                rejected[result.why.value] += 1
            notes.append(f"{name} rejected: {result.why}")
        elif isinstance(result, Known) and result.flagged:
            notes.append(f"{name} was above its bound and is used as {result.value:g}")
        for other, second in list(judged.items())[1:]:
            if isinstance(second, Known) and isinstance(result, Known) and second.value != result.value:
                notes.append(
                    f"{name} and {other} differ ({result.value:g} and {second.value:g}); {name} is the newer name and is used"
                )
    for which in LATENCIES:
        found = histogram(page, which)
        if not isinstance(found, Unknown) and found.bad_why:
            rejected[PageTrouble.BAD_HISTOGRAM.value] += 1
            notes.append(f"{found.source} has no quantiles: {found.bad_why}")
    return Found(readings, matched, tuple(notes), rejected)


def _reduced(series: Sequence[Series], reading: str, bounds: Bounds, at_s: float) -> Reading:
    """Several series of one metric as one number. Unknown as soon as one of them is: part of a sum is not the sum.

    A share is as bad as its worst rank. Anything else is taken once for each set of copies (the largest; of a capacity the
    smallest) and added up over what is left: data-parallel ranks, models.
    """
    copies: dict[tuple[tuple[str, str], ...], list[float]] = {}
    flagged = False
    for one in without_priorities(series, reading):
        result = judge(_number(one.value), bounds, at_s)
        if not isinstance(result, Known):
            return result
        flagged |= result.flagged
        key = tuple(sorted((k, v) for k, v in one.labels.items() if k not in COPIES))
        copies.setdefault(key, []).append(result.value)
    if reading == "kv_share":
        return Known(max(max(values) for values in copies.values()), at_s, flagged)
    pick = min if reading == "kv_capacity_tokens" else max
    return Known(float(sum(pick(values) for values in copies.values())), at_s, flagged)


def without_priorities(series: Sequence[Series], reading: str) -> Sequence[Series]:
    """With priority scheduling SGLang writes a gauge's total under priority="" and its parts beside it: not to be added."""
    if reading.endswith("_total") or not any(one.labels.get("priority") for one in series):
        return series
    totals = [one for one in series if not one.labels.get("priority")]
    return totals or series


def _number(value: Any) -> Any:
    """The parser's word for what it could not read is text, and the word "idle" is ours, not a page's."""
    return "" if isinstance(value, str) else value


def mean_latency(before: Page | None, after: Page, which: str, at_s: float) -> Reading:
    """The mean of a latency over the requests that ended between two pages; confirmed idle where none did and none is at work."""
    now = histogram(after, which)
    if isinstance(now, Unknown):
        return now
    then = histogram(before, which) if before is not None else Unknown(UnknownWhy.MISSING)
    if isinstance(then, Unknown):
        return Unknown(UnknownWhy.WARMING, at_s)
    grown = between(then, now)
    if isinstance(grown, Unknown):
        return Unknown(grown.why, at_s)
    if (found := mean(grown)) is not None:
        return Known(found, at_s)
    readings = read_page(after, at_s).readings
    at_rest = all(readings[n] == Known(0.0, at_s) for n in ("running", "waiting"))
    return ConfirmedIdle(at_s) if at_rest else Unknown(UnknownWhy.MISSING)


def label_disagreement(page: Page, role: Role | None) -> str | None:
    """Says so where the engine_type label names the other role. "unified" and "dynamic" name none, and disagree with none."""
    said = {one.labels.get("engine_type") for series in page.series.values() for one in series} & set(Role)
    if role is not None and said == {role.other}:
        return f"the engine_type label says {role.other}, the engine itself says {role}: the engine is right"
    return None


REASONS: tuple[str, ...] = (
    *PageTrouble,
    UnknownWhy.NOT_FINITE,
    UnknownWhy.NEGATIVE,
    UnknownWhy.ABSURD,
    UnknownWhy.UNIT_ERROR,
)
