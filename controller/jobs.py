"""What must happen every few seconds, minutes or hours: leadership, expiry, roll-ups, retention.

Never part of a decision: a job that fails is logged and tried again at its next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Protocol

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger

from controller.grafana import EVERY_S as ANNOTATE_EVERY_S
from controller.grafana import Grafana
from controller.routes.bodies import to_json
from controller.security.sessions import Sweep
from controller.settings import RetentionSettings
from controller.store import history
from controller.store.engine import StoreUnavailable
from controller.store.writes import Store, expiry
from controller.stream import Hub
from fluidpd.record import PauseRow, PinRow

_log = logging.getLogger(__name__)
RENEW_EVERY_S, EXPIRE_EVERY_S, ROLL_UP_EVERY_S, PRUNE_EVERY_S = 2, 1, 60, 3600
SESSIONS_EVERY_S = 5
_LOOK_AT_CLOCK_S = 1.0


class Kept(Protocol):
    """What the jobs need of the controller."""

    async def renew_leadership(self) -> Any: ...

    @property
    def lapsed(self) -> list[PinRow | PauseRow]:
        """Pins and pauses whose time is over by the clock that nobody sets; taken from here once that is on disk."""


class Every(BaseTrigger):  # type: ignore[misc]  # the library has no types
    """So long after it last ran, or was due: what a clock that was set forward skipped is not counted through."""

    def __init__(self, seconds: float) -> None:
        self.period = timedelta(seconds=seconds)

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        return now + self.period


class Jobs:
    """Started after the controller, stopped before it."""

    def __init__(
        self,
        controller: Kept,
        store: Store,
        hub: Hub,
        retention: RetentionSettings,
        *,
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
        sweep: Sweep | None = None,
        grafana: Grafana | None = None,
    ) -> None:
        self._sweep, self._grafana = sweep, grafana
        self._controller, self._store, self._hub, self._retention, self._wall = controller, store, hub, retention, wall
        self._now, self._began = now, (wall(), now())
        # The event loop's own wakeups; one instance of each job, and a late one runs once, not many times.
        self._scheduler = AsyncIOScheduler(
            timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        for job, every_s in (
            (self.renew, RENEW_EVERY_S),
            (self.expire, EXPIRE_EVERY_S),
            (self.roll_up, ROLL_UP_EVERY_S),
            (self.prune, PRUNE_EVERY_S),
            *(((self._sweep.end_sessions, SESSIONS_EVERY_S), (self._sweep.forget_logins, PRUNE_EVERY_S)) if self._sweep else ()),
            *(((self._grafana.push, ANNOTATE_EVERY_S),) if self._grafana is not None else ()),
        ):
            self._scheduler.add_job(_guarded(job), Every(every_s), id=job.__name__)
        self._scheduler.start()
        self._watching = asyncio.create_task(self._watch_clock(self._wall()), name="jobs-clock")

    async def _watch_clock(self, seen: float) -> None:
        """The scheduler goes by the wall clock: after one was set back, jobs would wait until the old time has come again."""
        while True:
            await asyncio.sleep(_LOOK_AT_CLOCK_S)
            now = self._wall()
            if now < seen:
                _log.warning("the wall clock was set back by %.0f s: jobs go on from now", seen - now)
                for job in self._scheduler.get_jobs():
                    job.reschedule(job.trigger)
            seen = now

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self._scheduler.shutdown(wait=False)
        await asyncio.sleep(0)  # the scheduler cancels its timers in the next turn of the loop

    async def renew(self) -> None:
        await self._controller.renew_leadership()

    async def expire(self) -> None:
        """The controller has let go of them already: the database is told. The wall clock has no say: it may jump."""
        lapsed = self._controller.lapsed
        while lapsed:
            gone, now = lapsed[0], self._wall()
            if await self._store.lapse(gone, now):
                self._hub.publish("audit", to_json(expiry(gone, now)))
            lapsed.remove(gone)

    async def roll_up(self) -> None:
        await history.roll_up(self._store, self._wall())

    async def prune(self) -> None:
        """By the wall clock, but never ahead of what has really passed here: a clock set forward must not delete the record."""
        began_wall_s, began_s = self._began
        await history.prune(self._store, min(self._wall(), began_wall_s + self._now() - began_s), self._retention.days)


def _guarded(job: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        try:
            await job()
        except asyncio.CancelledError:
            _log.info("%s was cut short: the jobs stop", getattr(job, "__name__", job))  # the scheduler would log a failure
        except StoreUnavailable as error:
            _log.warning("%s waits: %s", getattr(job, "__name__", job), error)
        except Exception:
            _log.exception("%s failed; it runs again at its next time", getattr(job, "__name__", job))

    return run
