"""How the loop itself is doing: durations of the judgement and of the whole tick, lateness, failures.

Never touches what it measures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from controller.metric_set import OF_THE_PROCESS
from fluidpd.metric import observed
from fluidpd.slo import nearest_rank

_KEPT = 4096


class TickStats:
    """The last few thousand ticks. `judge` is snapshot, derive and decide; storing and sending are not in it."""

    def __init__(self) -> None:
        self.ticks = 0
        self.failed = 0
        self.overruns = 0
        self.last_success_wall_s: float | None = None
        self.durations = observed(next(s for s in OF_THE_PROCESS if s.name == "fluidpd_tick_duration_seconds"))
        self._judge_s: deque[float] = deque(maxlen=_KEPT)
        self._whole_s: deque[float] = deque(maxlen=_KEPT)
        self._late_s: deque[float] = deque(maxlen=_KEPT)

    def add(self, judge_s: float, whole_s: float, wall_s: float) -> None:
        self.ticks += 1
        self.last_success_wall_s = wall_s
        self.durations.observe(judge_s)
        self._judge_s.append(judge_s)
        self._whole_s.append(whole_s)

    def late(self, late_s: float, period_s: float) -> None:
        self._late_s.append(max(0.0, late_s))
        self.overruns += late_s > period_s

    def summary(self) -> dict[str, float | int | None]:
        return {
            "ticks": self.ticks,
            "failed": self.failed,
            "overruns": self.overruns,
            "last_success_wall_s": self.last_success_wall_s,
            "p50_s": _quantile(self._judge_s, 0.5),
            "p99_s": _quantile(self._judge_s, 0.99),
            "max_s": _quantile(self._judge_s, 1.0),
            "whole_p99_s": _quantile(self._whole_s, 0.99),
            "lag_p99_s": _quantile(self._late_s, 0.99),
        }


def _quantile(values: Sequence[float] | deque[float], share: float) -> float | None:
    return nearest_rank(list(values), share) if values else None
