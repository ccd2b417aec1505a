"""Reads the store's records for pages, and shares each answer for a moment between all who look.

Never writes, and never guesses: an unreadable store is an error with a remedy, not an empty page.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from controller.store.engine import StoreUnavailable
from dashboard.urls import Window
from fluidpd.record import (
    DecisionRow,
    IndexSecond,
    PauseRow,
    PinRow,
    StatusRow,
    TransitionRow,
    WorkerRow,
    WorkerSecond,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

CHART_POINTS = 900
LANE_ROWS = 30_000  # rows one lane drawing may read; more workers or a longer window get coarser steps
SHARED_S = 0.4  # shorter than the refresh period, so every refresh is fresh and a crowd of tabs costs one query


class Reads(Protocol):
    """The part of the store's queries that pages use."""

    async def status(self) -> StatusRow | None: ...
    async def workers(self) -> tuple[WorkerRow, ...]: ...
    async def pins(self, now_wall_s: float) -> tuple[PinRow, ...]: ...
    async def pause(self, now_wall_s: float) -> PauseRow | None: ...
    async def transitions(
        self,
        *,
        limit: int = 50,
        worker: str | None = None,
        open_only: bool = False,
        since_wall_s: float | None = None,
        until_wall_s: float | None = None,
    ) -> tuple[TransitionRow, ...]: ...
    async def decisions(
        self, *, limit: int = 100, since_wall_s: float | None = None, until_wall_s: float | None = None
    ) -> tuple[DecisionRow, ...]: ...
    async def index_history(self, index: str, since_s: int, until_s: int, step_s: int) -> tuple[IndexSecond, ...]: ...
    async def worker_history(self, since_s: int, until_s: int, step_s: int) -> tuple[WorkerSecond, ...]: ...
    async def latest_worker_seconds(self) -> tuple[WorkerSecond, ...]: ...


class StoreUnreadable(RuntimeError):
    """The records could not be read. The message is for a person; the cause is in the log."""


class Records:
    """The reads of one dashboard process. `wall` is the clock that ages are measured against."""

    def __init__(self, queries: Reads, wall: Callable[[], float], shared_s: float = SHARED_S, insecure: str = "") -> None:
        self.queries = queries
        self.insecure = insecure  # a sentence for every page
        self.wall = wall
        self.shared_s = shared_s
        self._kept: dict[object, tuple[float, Any]] = {}
        self._locks: dict[object, asyncio.Lock] = {}

    async def status(self) -> StatusRow | None:
        return await self._shared("status", self.queries.status)

    async def workers(self) -> tuple[WorkerRow, ...]:
        return await self._shared("workers", self.queries.workers)

    async def pins(self) -> tuple[PinRow, ...]:
        return await self._shared("pins", lambda: self.queries.pins(self.wall()))

    async def pause(self) -> PauseRow | None:
        return await self._shared("pause", lambda: self.queries.pause(self.wall()))

    async def open_moves(self) -> tuple[TransitionRow, ...]:
        return await self._shared("open", lambda: self.queries.transitions(open_only=True))

    async def latest_moves(self, limit: int) -> tuple[TransitionRow, ...]:
        return await self._shared(("moves", limit), lambda: self.queries.transitions(limit=limit))

    async def moves_in(self, window: Window) -> tuple[TransitionRow, ...]:
        # A move that began before the window may reach into it.
        return await self._shared(
            ("moves-in", window.range), lambda: self.queries.transitions(limit=500, since_wall_s=window.since_s - 120)
        )

    async def latest_decisions(self, limit: int) -> tuple[DecisionRow, ...]:
        return await self._shared(("decisions", limit), lambda: self.queries.decisions(limit=limit))

    async def decisions_in(self, window: Window) -> tuple[DecisionRow, ...]:
        return await self._shared(
            ("decisions-in", window.range), lambda: self.queries.decisions(limit=400, since_wall_s=window.since_s)
        )

    async def latest_seconds(self) -> dict[str, WorkerSecond]:
        rows: tuple[WorkerSecond, ...] = await self._shared("latest", self.queries.latest_worker_seconds)
        return {row.worker: row for row in rows}

    async def lanes(self, window: Window) -> tuple[tuple[WorkerSecond, ...], int]:
        """The workers' history in the window, and the step it was read at."""
        workers = len(await self.workers())
        step_s = nice_step_s(max(window.length_s / CHART_POINTS, window.length_s * workers / LANE_ROWS))
        rows = await self._shared(
            ("lanes", window.range),
            lambda: self.queries.worker_history(math.floor(window.since_s), math.ceil(window.until_s), step_s),
            # A coarse drawing does not change within its own step.
            max(self.shared_s, step_s / 2),
        )
        return rows, step_s

    async def index(self, name: str, window: Window, since_s: int) -> tuple[tuple[IndexSecond, ...], int]:
        step_s = nice_step_s(window.length_s / CHART_POINTS)
        until_s = math.ceil(window.until_s)
        rows = await self._shared(
            ("index", name, window.range, since_s // step_s), lambda: self.queries.index_history(name, since_s, until_s, step_s)
        )
        return rows, step_s

    def forget(self) -> None:
        """After an action: what is shown next must be read anew."""
        self._kept.clear()

    async def _shared(self, key: object, read: Callable[[], Awaitable[T]], for_s: float | None = None) -> T:
        keep_s = self.shared_s if for_s is None else for_s
        async with self._locks.setdefault(key, asyncio.Lock()):
            now = self.wall()
            kept = self._kept.get(key)
            # The lower bound: a wall clock that was set back must not freeze a page.
            if kept is not None and 0.0 <= now - kept[0] < keep_s:
                return kept[1]  # type: ignore[no-any-return]
            try:
                value = await read()
            except StoreUnavailable as error:
                raise StoreUnreadable(str(error)) from error
            except Exception as error:
                log.exception("reading %s failed", key)
                told = f"The database could not be read ({type(error).__name__}); the log has the details."
                raise StoreUnreadable(told) from error
            if len(self._kept) > 256:  # every follower of a chart asks from its own second
                self._kept.clear()
                self._locks = {key: self._locks[key]}
            self._kept[key] = (now, value)
            return value


def nice_step_s(at_least_s: float) -> int:
    """A step no finer than asked; coarse ones are whole minutes, so that the store's roll-ups can answer."""
    return next((s for s in (1, 2, 4, 5, 10, 15, 60, 120, 300, 600) if s >= at_least_s), 3600)
