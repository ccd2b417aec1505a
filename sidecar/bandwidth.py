"""The cap on handoff traffic, as a token bucket: at most a share of the link, whatever the number of handoffs.

Never sleeps and never reads a clock: `take` says how long to wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """Invariant: in any window of t seconds at most rate * t + burst bytes start moving, if every taker waits as told."""

    rate_bytes_per_s: float
    burst_bytes: float
    _balance: float = field(init=False)
    _at_s: float | None = field(init=False, default=None)
    taken_bytes: int = field(init=False, default=0)
    waited_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_bytes_per_s) and self.rate_bytes_per_s > 0 and self.burst_bytes >= 0):
            raise ValueError(
                f"a bucket needs a positive finite rate and a burst >= 0, not {self.rate_bytes_per_s}, {self.burst_bytes}"
            )
        self._balance = self.burst_bytes

    def take(self, size_bytes: int, now_s: float) -> float:
        """Book `size_bytes`; returns the seconds to wait before moving them. Takers are served in the order they ask."""
        if size_bytes < 0:
            raise ValueError("a transfer cannot have a negative size")
        if self._at_s is not None:
            self._balance = min(self.burst_bytes, self._balance + max(0.0, now_s - self._at_s) * self.rate_bytes_per_s)
        self._at_s = now_s if self._at_s is None else max(self._at_s, now_s)
        self._balance -= size_bytes
        self.taken_bytes += size_bytes
        wait_s = max(0.0, -self._balance / self.rate_bytes_per_s)
        self.waited_s += wait_s
        return wait_s

    def debt_bytes(self, now_s: float) -> float:
        """How many booked bytes are still waiting their turn."""
        since = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        return max(0.0, -(self._balance + since * self.rate_bytes_per_s))
