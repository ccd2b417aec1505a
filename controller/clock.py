"""Time for the controller: a monotonic clock to decide on, a wall clock to show, and sleep; and the same, driven by hand.

Never mixes the two: a jump of the wall clock moves nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time


class Clock:
    """The machine's clocks."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds, for people."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class FakeClock(Clock):
    """A clock that stands still until `advance`; sleepers wake when their time is reached."""

    def __init__(self, now_s: float = 1000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._wall_s = wall_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._wall_s

    def jump_wall(self, seconds: float) -> None:
        """What an administrator or NTP does: the wall clock alone."""
        self._wall_s += seconds

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), woken))
        await woken

    async def advance(self, seconds: float, settle_turns: int = 20) -> None:
        """Let time pass in order, waking each sleeper at its own moment, then let what they started run."""
        until = self._now_s + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            due, _, woken = heapq.heappop(self._sleepers)
            self._move(max(due, self._now_s))
            if not woken.done():
                woken.set_result(None)
            for _ in range(settle_turns):
                await asyncio.sleep(0)
        self._move(until)
        for _ in range(settle_turns):
            await asyncio.sleep(0)

    def _move(self, now_s: float) -> None:
        self._wall_s += now_s - self._now_s
        self._now_s = now_s
