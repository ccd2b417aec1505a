"""SLOs as they stand on record: for the API of any controller, and for the dashboard, which reads the same tables.

Never guesses: no row, no number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from controller.store.alert_queries import AlertQueries, Bucket, Counts
from fluidpd.burn import MINUTE_S, PERIOD_S, WINDOWS_S, Burn, Track, budget, burn_rates, exhausted_in_s, judge


@dataclass(frozen=True, slots=True)
class PairView:
    """One pair of windows. Ratios are shares of bad requests; `burning` None: not known."""

    name: str
    severity: str
    windows: str
    factor: float
    threshold: float
    long_ratio: float | None
    short_ratio: float | None
    requests: float | None
    known_share: float
    burning: bool | None
    why_not: str


@dataclass(frozen=True, slots=True)
class SloView:
    """One SLO of one model over its period; None where it is not known. `minutes`: the last hour, oldest first."""

    model: str
    slo: str
    target_s: float | None
    objective: float
    window_scale: int
    basis: str
    period_s: float
    judged: float
    good: float
    attainment: float | None
    known_share: float
    budget_left: float | None
    exhausted_in_s: float | None  # None also: not within a period
    burn_rates: Mapping[str, float | None]
    pairs: tuple[PairView, ...]
    minutes: tuple[Bucket, ...]


def track_of(buckets: tuple[Bucket, ...], bucket_s: int) -> Track:
    """Buckets as counters that run on from the beginning of the first."""
    track, grown = Track(), Counts()
    if buckets:
        track.add(buckets[0].second, 0.0, 0.0, 0.0)
    for bucket in buckets:
        grown = grown.plus(bucket.counts)
        track.add(bucket.second + bucket_s, grown.total, grown.bad, grown.known_s)
    return track


async def slo_views(read: AlertQueries, now_s: float) -> tuple[SloView, ...]:
    """One for each SLO of each model that was ever counted, as of the last whole minute."""
    found = []
    sums: dict[float, Mapping[tuple[str, str], Counts]] = {}
    for (model, slo), terms in (await read.terms()).items():
        scale, objective = terms.window_scale, terms.objective
        bucket_s, period_s = MINUTE_S // scale, PERIOD_S / scale
        end_s = math.floor(now_s / bucket_s) * bucket_s
        if period_s not in sums:
            sums[period_s] = await read.sums(end_s - period_s)
        counts = sums[period_s].get((model, slo), Counts())
        buckets = await read.buckets((model, slo), end_s - WINDOWS_S["3d"] / scale - bucket_s, end_s)
        track = track_of(buckets, bucket_s)
        left = budget(counts.total, counts.bad, counts.known_s, objective, period_s)
        rates = burn_rates(track, end_s, objective, scale)
        gone_s = exhausted_in_s(left.left, rates["6h"], period_s)
        found.append(
            SloView(
                model=model,
                slo=slo,
                target_s=terms.target_s,
                objective=objective,
                window_scale=scale,
                basis=terms.basis,
                period_s=period_s,
                judged=counts.total,
                good=counts.good,
                attainment=counts.good / counts.total if counts.total else None,
                known_share=left.known,
                budget_left=left.left,
                exhausted_in_s=gone_s if gone_s is not None and gone_s < period_s else None,
                burn_rates=rates,
                pairs=tuple(_pair(burn) for burn in judge(track, end_s, objective, scale)),
                minutes=tuple(b for b in buckets if b.second >= end_s - WINDOWS_S["1h"] / scale),
            )
        )
    return tuple(found)


def _pair(burn: Burn) -> PairView:
    return PairView(
        name=burn.pair.name,
        severity=burn.pair.severity,
        windows=burn.pair.windows,
        factor=burn.pair.factor,
        threshold=burn.threshold,
        long_ratio=burn.long_ratio,
        short_ratio=burn.short_ratio,
        requests=burn.requests,
        known_share=burn.known,
        burning=burn.burning,
        why_not=burn.why_not,
    )
