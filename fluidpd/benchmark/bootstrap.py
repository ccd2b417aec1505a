"""How sure an attainment is: a circular moving-block bootstrap over time, since neighbouring requests share their fate.

A trace has no seed variance; what varies is which stretch of it was seen.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

BIN_S = 5.0
BLOCK_S = 60.0


def counted(arrivals: Sequence[tuple[float, bool]], duration_s: float) -> list[tuple[int, int]]:
    """Per BIN_S of time: requests, and those of them that were good."""
    bins = [(0, 0)] * (int(duration_s / BIN_S) + 1)
    for at_s, good in arrivals:
        many, met = bins[i := min(int(at_s / BIN_S), len(bins) - 1)]
        bins[i] = many + 1, met + good
    return bins


def interval(
    bins: Sequence[tuple[int, int]], *, confidence: float = 0.95, resamples: int = 400, seed: int = 0
) -> tuple[float, float] | None:
    """The middle `confidence` of the attainments of `resamples` series drawn in blocks; None without a request."""
    n = len(bins)
    if not sum(many for many, _ in bins):
        return None
    block = max(1, min(round(BLOCK_S / BIN_S), n // 10))
    many = list(itertools.accumulate((b[0] for b in (*bins, *bins[:block])), initial=0))
    good = list(itertools.accumulate((b[1] for b in (*bins, *bins[:block])), initial=0))
    sums = [(many[i + block] - many[i], good[i + block] - good[i]) for i in range(n)]
    rng = random.Random(seed)
    found = []
    for _ in range(resamples):
        drawn = rng.choices(sums, k=-(-n // block))
        total = sum(d[0] for d in drawn)
        if total:
            found.append(sum(d[1] for d in drawn) / total)
    found.sort()
    tail = (1 - confidence) / 2
    last = len(found) - 1
    return found[round(tail * last)], found[round((1 - tail) * last)]
