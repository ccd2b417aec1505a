"""Reads the store's records for pages, and shares each answer for a moment between all who look.

Never writes, and never guesses: an unreadable store is an error with a remedy, not an empty page.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from controller.store.engine import StoreUnavailable
from dashboard.urls import Window
from fluidpd.record import (
    AuditRow,
    BasisRow,
    CommandRow,
    DecisionRow,
    IndexSecond,
    PauseRow,
    PinRow,
    RoleSpan,
    SessionRow,
    SnapshotRow,
    StatusRow,
    TransitionRow,
    WorkerRow,
    WorkerSecond,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

CHART_POINTS = 900
MARKS = 400  # decisions that one chart marks
LANE_STEPS_S = (1, 60, 300, 3600)  # what the store keeps
HOUR_S, SETTLED_S, SETTLED_KEPT_S = 3600, 900, 600.0  # a quarter of an hour later everything is written and rolled up
SUM_ROWS = 15_000  # of a counter that only grows, fewer tell as much
LANE_ROWS = 60_000  # rows one lane drawing may be made of; more workers or a longer window get coarser steps
SHARED_S = 0.4  # shorter than the refresh period, so every refresh is fresh and a crowd of tabs costs one query


class Reads(Protocol):
    """The part of the store's queries that pages use."""

    def one_moment(self) -> AbstractAsyncContextManager[None]: ...
    async def status(self) -> StatusRow | None: ...
    async def workers(self) -> tuple[WorkerRow, ...]: ...
    async def pins(self, now_wall_s: float) -> tuple[PinRow, ...]: ...
    async def pause(self, now_wall_s: float) -> PauseRow | None: ...
    async def pauses(self, now_wall_s: float) -> tuple[PauseRow, ...]: ...
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
    async def role_spans(self, since_s: float, until_s: float, step_s: int) -> tuple[RoleSpan, ...]: ...
    async def borrowed_tokens(self, since_s: float, until_s: float, step_s: int) -> float | None: ...
    async def worker_history(
        self, since_s: int, until_s: int, step_s: int, worker: str | None = None
    ) -> tuple[WorkerSecond, ...]: ...
    async def audit(
        self,
        limit: int = 100,
        *,
        actor: str = "",
        verb: str = "",
        outcome: str = "",
        subject: str = "",
        since_wall_s: float | None = None,
        until_wall_s: float | None = None,
        below_id: int | None = None,
    ) -> tuple[AuditRow, ...]: ...
    async def session(self, sha256: str, now_wall_s: float) -> SessionRow | None: ...
    async def latest_worker_seconds(self) -> tuple[WorkerSecond, ...]: ...
    async def transition(self, id: str) -> TransitionRow | None: ...
    async def decision(self, id: int) -> DecisionRow | None: ...
    async def decision_after(self, id: int) -> DecisionRow | None: ...
    async def commands(
        self, limit: int = 100, worker: str | None = None, since_wall_s: float | None = None, until_wall_s: float | None = None
    ) -> tuple[CommandRow, ...]: ...
    async def snapshot_before(self, second: int, within_s: int = 10) -> SnapshotRow | None: ...
    async def snapshots_every(
        self, since_s: float, until_s: float, every_s: int, limit: int = 120
    ) -> tuple[SnapshotRow, ...]: ...
    async def basis(self, id: str) -> BasisRow | None: ...
    async def judged(self, slo: str, since_s: float, until_s: float) -> tuple[float, float]: ...


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

    async def audit(self, limit: int, **wanted: Any) -> tuple[AuditRow, ...]:
        """As the store's query: actor, verb, outcome, subject, since_wall_s, until_wall_s, below_id."""
        return await self._shared(("audit", limit, *sorted(wanted.items())), lambda: self.queries.audit(limit, **wanted))

    async def session(self, sha256: str) -> SessionRow | None:
        found = await self._shared(("session", sha256), lambda: self.queries.session(sha256, self.wall()))
        return found if found is None or found.expires_wall_s > self.wall() else None

    async def pauses(self) -> tuple[PauseRow, ...]:
        """All that hold this pool, the widest first."""
        return await self._shared("pauses", lambda: self.queries.pauses(self.wall()))

    async def open_moves(self) -> tuple[TransitionRow, ...]:
        return await self._shared("open", lambda: self.queries.transitions(open_only=True))

    async def latest_moves(self, limit: int) -> tuple[TransitionRow, ...]:
        return await self._shared(("moves", limit), lambda: self.queries.transitions(limit=limit))

    async def moves_in(self, window: Window) -> tuple[TransitionRow, ...]:
        """Newest first; also those that began before the window and reach into it."""
        return await self._shared(
            ("moves-in", window.key),
            lambda: self.queries.transitions(limit=500, since_wall_s=window.since_s, until_wall_s=window.until_s),
        )

    async def latest_decisions(self, limit: int) -> tuple[DecisionRow, ...]:
        return await self._shared(("decisions", limit), lambda: self.queries.decisions(limit=limit))

    async def decisions_in(self, window: Window) -> tuple[DecisionRow, ...]:
        return await self._shared(
            ("decisions-in", window.key),
            lambda: self.queries.decisions(limit=MARKS, since_wall_s=window.since_s, until_wall_s=window.until_s),
        )

    async def latest_seconds(self) -> dict[str, WorkerSecond]:
        rows: tuple[WorkerSecond, ...] = await self._shared("latest", self.queries.latest_worker_seconds)
        return {row.worker: row for row in rows}

    async def lanes(self, window: Window) -> tuple[tuple[RoleSpan, ...], int]:
        """What the workers were in the window, in stretches, and the step of the rows these are made of."""
        step_s = await self._step_s(window, LANE_ROWS)
        rows: tuple[RoleSpan, ...] = ()
        for step_s in (s for s in LANE_STEPS_S if s >= step_s):
            rows = await (self._long_lanes(window, step_s) if step_s > 1 else self._spans(window, step_s))
            if rows or window.is_live:  # of a time long ago, only the roll-ups may be left
                break
        return rows, step_s

    async def _long_lanes(self, window: Window, step_s: int) -> tuple[RoleSpan, ...]:
        """Of a long window only the last hour or two are read again and again: before that nothing changes any more."""
        settled_s = math.floor((self.wall() - SETTLED_S) / HOUR_S) * HOUR_S
        since_s, until_s = math.floor(window.since_s / HOUR_S) * HOUR_S, math.ceil(window.until_s)
        old: tuple[RoleSpan, ...] = ()
        if since_s < settled_s:
            key = ("settled", step_s, settled_s)
            if (kept := self._kept.get(key)) is not None and kept[1][0] > since_s:
                del self._kept[key]  # it begins too late
            _, old = await self._shared(key, lambda: self._settled(since_s, settled_s, step_s), SETTLED_KEPT_S)
        tail_s = max(since_s, settled_s)
        new = await self._spans(replace(window, since_s=tail_s), step_s) if tail_s < until_s else ()
        return tuple(s for s in (*old, *new) if s.end_s > window.since_s and s.second < until_s)

    async def _spans(self, window: Window, step_s: int) -> tuple[RoleSpan, ...]:
        return await self._over("lanes", self.queries.role_spans, window, step_s)

    async def _settled(self, since_s: int, until_s: int, step_s: int) -> tuple[int, tuple[RoleSpan, ...]]:
        return since_s, await self.queries.role_spans(since_s, until_s, step_s)

    async def borrowed_tokens(self, window: Window) -> float | None:
        return await self._over("borrowed", self.queries.borrowed_tokens, window, await self._step_s(window, SUM_ROWS))

    async def _step_s(self, window: Window, most_rows: int) -> int:
        workers = max(1, len(await self.workers()))
        return next((s for s in LANE_STEPS_S if window.length_s / s * workers <= most_rows), LANE_STEPS_S[-1])

    async def _over(self, what: str, query: Callable[[float, float, int], Awaitable[T]], window: Window, step_s: int) -> T:
        # A coarse drawing does not change within its own step.
        keep_s = max(self.shared_s, step_s / 2)
        return await self._shared(
            (what, window.key, step_s), lambda: query(math.floor(window.since_s), math.ceil(window.until_s), step_s), keep_s
        )

    async def index(
        self, name: str, window: Window, since_s: int, points: int = CHART_POINTS
    ) -> tuple[tuple[IndexSecond, ...], int]:
        """One pressure index from `since_s` to the window's end in at most about `points` buckets, and their step."""
        until_s = math.ceil(window.until_s)

        async def read(step_s: int) -> tuple[IndexSecond, ...]:
            return await self._shared(
                ("index", name, window.key, since_s // step_s, step_s),
                lambda: self.queries.index_history(name, since_s, until_s, step_s),
            )

        return await finest_kept(window.length_s / points, window, read)

    def one_moment(self) -> AbstractAsyncContextManager[None]:
        """Around the reads of one page."""
        return self.queries.one_moment()

    def forget(self) -> None:
        """After an action: what is shown next must be read anew."""
        self._kept.clear()

    async def shared(self, key: object, read: Callable[[], Awaitable[T]], for_s: float | None = None) -> T:
        """For pages with reads of their own: one read for all who look, and trouble as StoreUnreadable."""
        return await self._shared(key, read, for_s)

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


STEPS_S = (1, 2, 4, 5, 10, 15, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600)
ROLLED_S = (60, 300, 3600)


def nice_step_s(at_least_s: float) -> int:
    """A step no finer than asked; coarse ones are whole minutes, so that the store's roll-ups can answer."""
    return next((s for s in STEPS_S if s >= at_least_s), 86_400)


async def finest_kept(
    least_s: float, window: Window, read: Callable[[int], Awaitable[tuple[T, ...]]]
) -> tuple[tuple[T, ...], int]:
    """What `read` finds at the finest step that fits, or at that of the roll-ups which outlive the seconds."""
    step_s = nice_step_s(least_s)
    rows = await read(step_s)
    if window.is_live or rows:
        return rows, step_s
    for coarser_s in (s for s in ROLLED_S if s > step_s and s < window.length_s):
        if rows := await read(coarser_s):
            return rows, coarser_s
    return rows, step_s
