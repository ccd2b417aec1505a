"""How often somebody may ask: a bucket that refills, one for each token or address.

Never waits and never reads a clock of its own: who is over the limit is told when to come again.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

_KEYS_KEPT = 4096


class RateLimit:
    """At most `per_minute` in any minute for each key, all at once if need be."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key -> (left, as of)

    def take(self, key: str) -> float | None:
        """None if it may go on, else the seconds until it may."""
        now_s = self._clock()
        left, as_of_s = self._buckets.pop(key, (float(self._per_minute), now_s))
        left = min(float(self._per_minute), left + (now_s - as_of_s) * self._per_minute / 60.0)
        allowed = left >= 1.0
        self._buckets[key] = (left - 1.0 if allowed else left, now_s)
        while len(self._buckets) > _KEYS_KEPT:
            self._buckets.popitem(last=False)
        return None if allowed else (1.0 - left) * 60.0 / self._per_minute


@dataclass(slots=True)
class Streams:
    """Event streams that are open, by token."""

    most: int
    open: Counter[str] = field(default_factory=Counter)

    def is_full(self, key: str) -> bool:
        return self.open[key] >= self.most

    async def held(self, key: str, lines: AsyncIterator[str]) -> AsyncIterator[str]:
        """The same lines, counted as one stream of `key` from the first to the last."""
        self.open[key] += 1
        try:
            async for line in lines:
                yield line
        finally:
            self.open[key] -= 1
            if not self.open[key]:
                del self.open[key]
