"""The event hub behind the SSE stream: publish without waiting, replay what a reconnecting listener missed.

Never slows a publisher: a listener that cannot keep up loses events, is told so, and starts again from the present.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel

_log = logging.getLogger(__name__)
EVENTS = ("status", "workers", "indices", "transition", "decision", "audit")
_WHOLE = "workers"  # holds every worker, a megabyte for a thousand: of these only the newest is replayed, so only that is kept
RING = 2_000
HEARTBEAT_S = 15.0
RETRY_MS = 2_000
_QUEUE = 512


@dataclass(frozen=True, slots=True)
class Event:
    id: str
    name: str
    data: str

    def text(self) -> str:
        return f"id: {self.id}\nevent: {self.name}\ndata: {self.data}\n\n"


def json_bytes(value: Any) -> bytes:
    """Strict JSON of records, enums and plain values, quick enough for the loop: NaN and infinities become null."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else str(value)


class Hub:
    """Event ids are `<start of this process>-<number>`, so that an id of an earlier process is recognised as such."""

    def __init__(self, *, ring: int = RING, wall: Callable[[], float] = time.time, max_listeners: int = 100) -> None:
        self._boot = f"{int(wall() * 1000):x}"
        self._number = 0
        self._size = ring
        self._ring: dict[int, Event] = {}  # by number, oldest first
        self._whole = 0
        self._listeners: dict[asyncio.Queue[Event | None], frozenset[str] | None] = {}  # and what each wants; None: everything
        self._max_listeners = max_listeners
        self._closed = False
        self._taps: list[Callable[[str, Mapping[str, Any]], None]] = []

    def tap(self, seen: Callable[[str, Mapping[str, Any]], None]) -> None:
        """Have `seen` called with every event, before listeners get it. It must be quick."""
        self._taps.append(seen)

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def wants(self, event: str) -> bool:
        """Whether anybody listens to such events: what is costly to make need not be made for nobody."""
        return any(only is None or event in only for only in self._listeners.values())

    @property
    def is_full(self) -> bool:
        return len(self._listeners) >= self._max_listeners

    def publish(self, event: str, data: Mapping[str, Any]) -> None:
        """Never waits, and never raises on data: what JSON cannot hold becomes null or text."""
        for seen in self._taps:
            try:
                seen(event, data)
            except Exception:
                _log.exception("a tap of the event hub failed on %s", event)
        self._number += 1
        item = Event(f"{self._boot}-{self._number}", event, json_bytes(data).decode())
        self._keep(item)
        for queue, only in tuple(self._listeners.items()):
            if only is not None and event not in only:
                continue
            try:
                queue.put_nowait(item)
            except asyncio.QueueFull:
                self._listeners.pop(queue, None)
                queue.get_nowait()
                queue.put_nowait(None)  # the listener reconnects and replays from the ring

    def _keep(self, item: Event) -> None:
        self._ring[self._number] = item
        self._ring.pop(self._number - self._size, None)
        if item.name == _WHOLE:
            self._ring.pop(self._whole, None)
            self._whole = self._number

    async def listen(
        self, last_id: str | None = None, *, only: frozenset[str] | None = None, heartbeat_s: float = HEARTBEAT_S
    ) -> AsyncIterator[str]:
        """SSE text for one listener, starting after `last_id` where the ring still has it; `only` these events."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue(_QUEUE)
        missed = self._since(last_id)
        self._listeners[queue] = only
        try:
            yield f"retry: {RETRY_MS}\n\n"
            if missed is None:
                # Not replayable (an older process, or too long ago): the listener must read the state anew.
                yield f"event: reset\ndata: {json_bytes({'last_event_id': last_id}).decode()}\n\n"
            for item in missed or ():
                if only is None or item.name in only:
                    yield item.text()
            while not self._closed:
                try:
                    async with asyncio.timeout(heartbeat_s):
                        item_or_end = await queue.get()
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if item_or_end is None:
                    return
                yield item_or_end.text()
        finally:
            self._listeners.pop(queue, None)

    def close(self) -> None:
        """End every stream, so that the server can stop."""
        self._closed = True
        for queue in tuple(self._listeners):
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    def _since(self, last_id: str | None) -> list[Event] | None:
        """Events after `last_id`; nothing for a first visit; None if they cannot be given without a gap."""
        if not last_id:
            return []
        boot, _, number = last_id.partition("-")
        if boot != self._boot or not number.isdigit() or int(number) > self._number:
            return None
        wanted = int(number) + 1
        if wanted <= self._number - self._size:
            return None
        return [item for number, item in self._ring.items() if number >= wanted]
