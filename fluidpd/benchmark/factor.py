"""Goodput: the highest load, as a factor on a workload's arrivals, at which a share of requests is still good.

Never simulates: who calls passes a function that does.
"""

from __future__ import annotations

from collections.abc import Callable

STEP = 1.05
LOWEST, HIGHEST = -40, 60  # exponents of STEP: x0.14 to x18.7


def factor_of(k: int) -> float:
    return float(round(STEP**k, 4))


class FactorSearch:
    """Factors are powers of STEP, so that two targets share runs. A run is made once; attainment is taken to fall with load."""

    def __init__(self, attainment_at: Callable[[float], float]) -> None:
        self._attainment_at = attainment_at
        self.seen: dict[int, float] = {}

    def _meets(self, k: int, target: float) -> bool:
        if k not in self.seen:
            self.seen[k] = self._attainment_at(factor_of(k))
        return self.seen[k] >= target

    def highest(self, target: float, guess: int = 0) -> float | None:
        """The largest factor on the grid that meets `target`, found by doubling steps and then halving them.

        None: not even the lowest factor does. HIGHEST is a lower bound: the search ends there.
        """
        met = [k for k, a in self.seen.items() if a >= target]
        missed = [k for k, a in self.seen.items() if a < target]
        low, high = max(met, default=None), min(missed, default=None)
        if low is not None and high is not None and low > high:  # not monotonic here: trust the lower side
            low = max((k for k in met if k < high), default=None)
        k, stride = (low if low is not None else high if high is not None else guess), 4
        while low is None or high is None:
            if k in (LOWEST, HIGHEST) and k in self.seen:
                return factor_of(k) if low is not None else None
            if self._meets(k, target):
                low = k
                k = min(HIGHEST, k + stride)
            else:
                high = k
                k = max(LOWEST, k - stride)
            stride *= 2
        while high - low > 1:
            k = (low + high) // 2
            if self._meets(k, target):
                low = k
            else:
                high = k
        return factor_of(low)
