"""Counts, once per request, whether a client's stream met its objectives: at the HTTP side that owns the stream.

Never counts prefill halves, peers' continuations, probes, or a client that left by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fluidpd.slo import SloTargets, meets_slo


@dataclass(slots=True)
class Timing:
    """One client's stream. Invariant: `gaps_s` are the gaps between its tokens as they left this worker, in order."""

    asked_s: float
    is_streaming: bool
    first_s: float | None = None
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)

    def row(self, tokens: int, now_s: float) -> None:
        if tokens <= 0:
            return
        if self.first_s is None:
            self.first_s = now_s
        elif self.is_streaming:
            self.gaps_s.append(now_s - self.last_s)  # tokens that come together come in one gap
        else:
            self.gaps_s.append((now_s - self.last_s) / tokens)  # nobody sees them singly: their mean counts
        self.last_s = now_s


class Tally:
    def __init__(self, targets: SloTargets) -> None:
        self.targets = targets
        self.requests_total = 0
        self.requests_good_total = 0

    def ended(self, timing: Timing, finish: dict[str, Any]) -> None:
        if finish.get("type") == "abort":
            if finish.get("status_code") is not None:
                self.requests_total += 1  # it failed
            return
        self.requests_total += 1
        ttft_s = None if timing.first_s is None else timing.first_s - timing.asked_s
        self.requests_good_total += meets_slo(ttft_s, timing.gaps_s, self.targets)
