"""What the judgement carries from one tick to the next: timers, the trend, who lends, when moves were made.

Never survives a restart on purpose: a new process starts its timers anew, so it cannot act on a past it did not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fluidpd.indices import Indices
from fluidpd.policy.forecast import Demand
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import ConfirmedIdle, Known, Reading, Snapshot, Unknown

_TREND_STEP_S = 0.1
_LEVEL_WEIGHT, _SLOPE_WEIGHT = 0.4, 0.2  # Holt's smoothing: slow enough to ignore one burst of arrivals


@dataclass(frozen=True, slots=True)
class Memory:
    """`*_since_s` is when a condition began to hold without a break; None = it does not hold, or is not known to."""

    started_s: float
    prefill_high_since_s: float | None = None
    decode_high_since_s: float | None = None
    trend_since_s: float | None = None
    home_since_s: float | None = None
    lenders: tuple[str, ...] = ()
    flips_s: tuple[float, ...] = ()
    trend_at_s: float | None = None
    level: float = 0.0
    slope_per_s: float = 0.0
    demand: Demand | None = None  # these five: the goodput judge's
    weighed_s: float | None = None  # when alternatives were rolled last
    weighed: Mapping[str, float | None] = field(default_factory=dict)  # what came of it, as a decision shows it
    lends_early: bool = False  # lending was predicted to pay before the pressure asked for it
    favoured: tuple[str, float] | None = None  # the move that is best, and since when

    def lent(self, lenders: tuple[str, ...]) -> Memory:
        return self if lenders == self.lenders else replace(self, lenders=lenders)

    def spent(self) -> Memory:
        """A move was decided: the evidence that led to it counts for no other."""
        return replace(
            self, prefill_high_since_s=None, decode_high_since_s=None, trend_since_s=None, home_since_s=None, favoured=None
        )

    def flipped(self, count: int, now_s: float) -> Memory:
        """Moves have really begun: they count against the budget of this minute."""
        return replace(self, flips_s=(*(t for t in self.flips_s if now_s - t < 60.0), *([now_s] * count)))


def observed(memory: Memory, snapshot: Snapshot, indices: Indices, settings: PolicySettings) -> Memory:
    """Timers and trend after one more look. An unknown pressure resets what depends on it: it is no evidence either way."""
    now = snapshot.now_s
    ppi, dpi = indices.ppi, indices.dpi
    memory = _with_trend(memory, ppi, now)
    predicted = memory.level + memory.slope_per_s * settings.trend_horizon_s
    trending = (
        isinstance(ppi, Known)
        and ppi.value > settings.prefill_over
        and predicted > settings.trend_high
        and memory.slope_per_s > 0
    )
    at_ease = (
        settings.home_prefill is not None
        and not isinstance(ppi, Unknown)
        and isinstance(dpi, Known)  # a fleet without decode load has no reason to move at all
        and not _above(ppi, settings.prefill_idle)
    )
    return replace(
        memory,
        prefill_high_since_s=_since(memory.prefill_high_since_s, _above(ppi, settings.prefill_high), now),
        decode_high_since_s=_since(memory.decode_high_since_s, _above(dpi, settings.decode_high), now),
        trend_since_s=_since(memory.trend_since_s, trending, now),
        home_since_s=_since(memory.home_since_s, at_ease, now),
    )


def _above(reading: Reading, bound: float) -> bool:
    return isinstance(reading, Known) and reading.value > bound


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _with_trend(memory: Memory, ppi: Reading, now_s: float) -> Memory:
    if isinstance(ppi, Unknown):
        return replace(memory, trend_at_s=None, level=0.0, slope_per_s=0.0)
    value = 0.0 if isinstance(ppi, ConfirmedIdle) else ppi.value
    if memory.trend_at_s is None:
        return replace(memory, trend_at_s=now_s, level=value, slope_per_s=0.0)
    elapsed = now_s - memory.trend_at_s
    if elapsed < _TREND_STEP_S:
        return memory
    level = _LEVEL_WEIGHT * value + (1 - _LEVEL_WEIGHT) * (memory.level + memory.slope_per_s * elapsed)
    slope = _SLOPE_WEIGHT * (level - memory.level) / elapsed + (1 - _SLOPE_WEIGHT) * memory.slope_per_s
    return replace(memory, trend_at_s=now_s, level=level, slope_per_s=slope)
