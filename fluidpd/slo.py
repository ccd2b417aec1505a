"""Service-level objectives of a pool, and whether one request met them.

Never counts or stores: a request is judged once, at the HTTP side that owns the client's stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class SloTargets(BaseModel):
    """Latency targets in seconds, and the share of requests that must meet them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    ttft_s: float = Field(default=2.0, gt=0, le=3600, description="time to first token, transfer included")
    tbt_s: float = Field(default=0.040, gt=0, le=60, description="p99 (nearest rank) of a request's own token gaps")
    ttft_objective: float = Field(default=0.99, gt=0, lt=1)
    tbt_objective: float = Field(default=0.99, gt=0, lt=1)
    joint_objective: float = Field(default=0.95, gt=0, lt=1)


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile: the smallest value with at least `share` of all values at or below it.

    Below 100 values the p99 is the maximum. Raises ValueError on no values: a quantile of nothing is unknown, not 0.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Verdict(NamedTuple):
    """Whether one request met each of its targets."""

    ttft: bool
    tbt: bool

    @property
    def both(self) -> bool:
        return self.ttft and self.tbt


FAILED = Verdict(ttft=False, tbt=False)


def verdict(ttft_s: float | None, gaps_s: Sequence[float], targets: SloTargets) -> Verdict:
    """On a completed request. One without a first token failed, and misses both: its client got nothing."""
    if ttft_s is None:
        return FAILED
    return Verdict(ttft_s <= targets.ttft_s, not gaps_s or nearest_rank(gaps_s, 0.99) <= targets.tbt_s)


def meets_slo(ttft_s: float | None, gaps_s: Sequence[float], targets: SloTargets) -> bool:
    """True iff a completed request met both targets. A request without a first token failed."""
    return verdict(ttft_s, gaps_s, targets).both
