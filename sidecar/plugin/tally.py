"""Counts, once per request, whether a client's stream met its objectives: at the HTTP side that owns the stream.

Never counts prefill halves, peers' continuations, probes, or a client that left by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fluidpd.slo import FAILED, SloTargets, Verdict, verdict


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
        self.ttft_good_total = 0
        self.tbt_good_total = 0

    def values(self) -> dict[str, int]:
        """As a sample carries them: each request counts once against each target, and once against both."""
        return {
            "requests_total": self.requests_total,
            "requests_good_total": self.requests_good_total,
            "ttft_judged_total": self.requests_total,
            "ttft_good_total": self.ttft_good_total,
            "tbt_judged_total": self.requests_total,
            "tbt_good_total": self.tbt_good_total,
        }

    def ended(self, timing: Timing, finish: dict[str, Any]) -> None:
        if finish.get("type") == "abort":
            if finish.get("status_code") is not None:
                self._count(FAILED)
            return
        ttft_s = None if timing.first_s is None else timing.first_s - timing.asked_s
        self._count(verdict(ttft_s, timing.gaps_s, self.targets))

    def _count(self, found: Verdict) -> None:
        self.requests_total += 1
        self.requests_good_total += found.both
        self.ttft_good_total += found.ttft
        self.tbt_good_total += found.tbt
