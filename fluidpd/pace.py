"""How fast a worker has been of late: work and the seconds it took, weighted by the work, old work fading with time.

Never a mean of rates: a hundred small steps and a large one are as fast as all their tokens over all their seconds.
"""

from __future__ import annotations

import math

TAU_S = 5.0


class Pace:
    """Of one kind of work. Times: monotonic seconds of one clock. What it rests on (`tokens`, `steps`) fades while idle, too."""

    __slots__ = ("_at_s", "_depth", "_spent_s", "_steps", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._steps = self._depth = self._spent_s = 0.0
        self._at_s = -math.inf

    def add(self, tokens: int, depth: int, spent_s: float, now_s: float) -> None:
        """A step that is over: `tokens` of work at `depth` tokens of context before them."""
        keep = self._kept(now_s)
        self._tokens = self._tokens * keep + tokens
        self._depth = self._depth * keep + tokens * depth
        self._steps = self._steps * keep + 1.0
        self._spent_s = self._spent_s * keep + spent_s
        self._at_s = now_s

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._at_s) / TAU_S)

    def per_s(self) -> float | None:
        """Tokens per second while at work; None if there was none."""
        return self._tokens / self._spent_s if self._spent_s > 0 else None

    def tokens(self, now_s: float) -> float:
        """How many tokens the rate rests on, the old ones faded."""
        return self._tokens * self._kept(now_s)

    def steps(self, now_s: float) -> float:
        return self._steps * self._kept(now_s)

    def depth(self) -> float:
        """Mean depth of a token; 0.0 if there was none."""
        return self._depth / self._tokens if self._tokens > 0 else 0.0
