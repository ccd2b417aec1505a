"""Quantiles of very many values in bounded memory: a histogram whose bins grow in proportion, so its error is relative.

The bins are those of DDSketch (Masson et al., VLDB 2019). Its Python package has no release since 2024 and adds one value at a
time; here a whole ramp of step times goes in at once, which is what makes leaping over tokens pay.
"""

from __future__ import annotations

import math
from functools import cache

RELATIVE_ERROR = 0.0025


_BASE = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_SCALE = 1.0 / math.log(_BASE)
_OFFSET = 100_000  # bins are numbered from far below any time, so that truncation rounds down


class Sketch:
    """Counts of positive values. Every quantile is within RELATIVE_ERROR of a nearest-rank one; mean and maximum are exact."""

    __slots__ = ("_counts", "count", "maximum", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """`times` may be negative: to take back what was counted before."""
        i = int(math.log(value) * _SCALE + _OFFSET) if value > 0 else 0
        counts = self._counts
        counts[i] = counts.get(i, 0) + times
        self.count += times
        self.total += value * times
        if value > self.maximum:
            self.maximum = value

    def add_ramp(self, first: float, slope: float, steps: int, times: int) -> None:
        """`steps` values first, first + slope, ..., each `times` times; the slope is not negative."""
        last = first + slope * (steps - 1)
        low = int(math.log(first) * _SCALE + _OFFSET)
        counts = self._counts
        if last < _upper_edge(low):
            counts[low] = counts.get(low, 0) + steps * times
        else:
            done = 0
            while done < steps:
                upto = min(steps, math.ceil((_upper_edge(low) - first) / slope))
                if upto > done:
                    counts[low] = counts.get(low, 0) + (upto - done) * times
                    done = upto
                low += 1
        self.count += steps * times
        self.total += times * steps * 0.5 * (first + last)
        if last > self.maximum:
            self.maximum = last

    def merge(self, other: Sketch) -> None:
        for i, n in other._counts.items():
            self._counts[i] = self._counts.get(i, 0) + n
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)

    def quantile(self, share: float) -> float | None:
        """The nearest-rank quantile; None of nothing: it is unknown, not 0."""
        left = math.ceil(share * self.count)
        if self.count <= 0:
            return None
        for i in sorted(self._counts):
            left -= self._counts[i]
            if left <= 0:
                return min(self.maximum, 2.0 * _upper_edge(i) / (_BASE + 1.0))
        return self.maximum

    def distribution(self) -> list[tuple[float, float]]:
        """(value, share of all at or below it), ascending: what a curve needs."""
        points, seen = [], 0
        for i in sorted(self._counts):
            seen += self._counts[i]
            points.append((min(self.maximum, _upper_edge(i)), seen / self.count))
        return points

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count > 0 else None

    @property
    def bins(self) -> int:
        return len(self._counts)


@cache
def _upper_edge(i: int) -> float:
    return float(_BASE ** (i + 1 - _OFFSET))
