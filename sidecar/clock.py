"""The sidecar's clock: monotonic seconds for durations, unix seconds for people.

Never used by the core, which takes every time as an argument.
"""

from __future__ import annotations

import asyncio
import time


class Clock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
