"""Tells open pages when to look again: at each event of the controller's stream, and once a second in any case.

Never carries records: pages read those from the store, so a page shows the same with the controller alive or dead.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dashboard.controller_client import Controller, ControllerGone

# What the beat brings anyway.
CALM_EVENTS = frozenset({"", "message", "status", "tick", "indices", "workers"})
SPACING_S = 0.25
RECONNECT_S = 2.0
HEARTBEAT_S = 15.0
KEPT = 900  # a quarter of an hour of beats: nobody who was away for longer wants them one by one


@dataclass(frozen=True, slots=True)
class Nudge:
    """`id` is `<start of this process>-<number>`: one of an earlier process is recognised as such."""

    id: str
    wall_s: float
    source: str  # controller, or database while the controller's stream is away
    events: tuple[str, ...]

    def as_sse(self) -> str:
        body = json.dumps({"wall_s": self.wall_s, "source": self.source, "events": self.events})
        return f"id: {self.id}\nevent: nudge\ndata: {body}\n\n"


class TooManyStreams(RuntimeError):
    """As many live pages as allowed are open; the next one polls."""


class Pulse:
    """Listens only while somebody looks."""

    def __init__(self, controller: Controller, wall: Callable[[], float], beat_s: float = 1.0, max_streams: int = 64) -> None:
        self.controller = controller
        self.wall = wall
        self.beat_s = beat_s
        self.max_streams = max_streams
        self.connected = False
        self._streams: set[asyncio.Queue[Nudge | None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._seen: list[str] = []
        self._urgent = asyncio.Event()
        self._count = 0
        self._boot = f"{int(wall() * 1000):x}"
        self._kept: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=KEPT)

    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def is_full(self) -> bool:
        return len(self._streams) >= self.max_streams

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[asyncio.Queue[Nudge | None]]:
        if self.is_full:
            raise TooManyStreams
        queue: asyncio.Queue[Nudge | None] = asyncio.Queue(maxsize=2)
        self._streams.add(queue)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]
        try:
            yield queue
        finally:
            self._streams.discard(queue)
            if not self._streams:
                await self.aclose()

    async def lines(self, last_id: str = "") -> AsyncIterator[str]:
        """The stream one browser reads. After a break (`last_id`) what was missed comes first, in one nudge or as a reset."""
        async with self.stream() as queue:
            yield "retry: 2000\n\n"
            if missed := self._missed(last_id):
                yield missed
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        nudge = await queue.get()
                    if nudge is None:
                        return
                    yield nudge.as_sse()
                except TimeoutError:
                    yield ": still here\n\n"

    async def aclose(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.connected = False

    async def _listen(self) -> None:
        while True:
            try:
                async for name in self.controller.events():
                    self.connected = True
                    if name not in CALM_EVENTS:
                        self._seen.append(name)
                        self._urgent.set()
            except ControllerGone:
                pass  # pages go on from the database; the header says how old its newest record is
            self.connected = False
            await asyncio.sleep(RECONNECT_S)

    async def _beat(self) -> None:
        while True:
            self._publish()
            await asyncio.sleep(min(SPACING_S, self.beat_s))
            try:
                async with asyncio.timeout(max(0.0, self.beat_s - SPACING_S)):
                    await self._urgent.wait()
            except TimeoutError:
                continue

    def _publish(self) -> None:
        self._count += 1
        events = tuple(dict.fromkeys(self._seen))
        self._seen.clear()
        self._urgent.clear()
        self._kept.append((self._count, events))
        nudge = Nudge(f"{self._boot}-{self._count}", self.wall(), "controller" if self.connected else "database", events)
        self._hand_out(nudge)

    def _missed(self, last_id: str) -> str:
        if not last_id:
            return ""
        boot, _, number = last_id.partition("-")
        after = int(number) if number.isdecimal() and len(number) < 16 else -1
        oldest = self._kept[0][0] if self._kept else self._count + 1
        if boot != self._boot or not oldest - 1 <= after <= self._count:
            # Of an earlier process, or too long ago: whoever shows something reads all of it anew.
            return "event: reset\ndata: {}\n\n"
        events = tuple(dict.fromkeys(e for count, names in self._kept if count > after for e in names))
        if after == self._count:
            return ""
        source = "controller" if self.connected else "database"
        return Nudge(f"{self._boot}-{self._count}", self.wall(), source, events).as_sse()

    def end_streams(self) -> None:
        """The process is going down: let every page go, so that nobody waits for anybody."""
        self._hand_out(None)

    def _hand_out(self, nudge: Nudge | None) -> None:
        for queue in self._streams:
            if queue.full():  # a slow page loses the older nudge, not the newest
                queue.get_nowait()
            queue.put_nowait(nudge)
