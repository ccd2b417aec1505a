"""What must happen every few seconds, minutes or hours: leadership, expiry, SLO minutes, roll-ups, retention.

Never part of a decision: a job that fails is logged and tried again at its next time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from controller.routes.bodies import to_json
from controller.settings import RetentionSettings
from controller.store import history
from controller.store.engine import StoreUnavailable
from controller.store.writes import Store, expiry
from controller.stream import Hub
from fluidpd.record import PinRow, StatusRow

_log = logging.getLogger(__name__)
RENEW_EVERY_S, EXPIRE_EVERY_S, SLO_EVERY_S, ROLL_UP_EVERY_S, PRUNE_EVERY_S = 2, 1, 10, 60, 3600


class Kept(Protocol):
    """What the jobs need of the controller."""

    def status(self) -> StatusRow: ...
    async def renew_leadership(self) -> Any: ...
    async def drop_pin(self, worker: str, actor: str, reason: str) -> Any: ...
    async def resume(self, actor: str, reason: str) -> Any: ...


class Jobs:
    """Started after the controller, stopped before it."""

    def __init__(
        self, controller: Kept, store: Store, hub: Hub, retention: RetentionSettings, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._controller, self._store, self._hub, self._retention, self._wall = controller, store, hub, retention, wall
        self._slo = SloMinutes(store, wall)
        # The event loop's own wakeups; one instance of each job, and a late one runs once, not many times.
        self._scheduler = AsyncIOScheduler(
            timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 30}
        )

    def start(self) -> None:
        for job, every_s in (
            (self.renew, RENEW_EVERY_S),
            (self.expire, EXPIRE_EVERY_S),
            (self.count_slo, SLO_EVERY_S),
            (self.roll_up, ROLL_UP_EVERY_S),
            (self.prune, PRUNE_EVERY_S),
        ):
            self._scheduler.add_job(_guarded(job), "interval", seconds=every_s, id=job.__name__)
        self._scheduler.start()

    async def stop(self) -> None:
        self._scheduler.shutdown(wait=False)
        await asyncio.sleep(0)  # the scheduler cancels its timers in the next turn of the loop

    async def renew(self) -> None:
        await self._controller.renew_leadership()

    async def expire(self) -> None:
        """The rows lapse here; the controller is told, so that its memory agrees."""
        now = self._wall()
        for gone in await self._store.expire(now):
            if isinstance(gone, PinRow):
                await self._controller.drop_pin(gone.worker, "fluidpd", "expired")
            else:
                await self._controller.resume("fluidpd", "expired")
            self._hub.publish("audit", to_json(expiry(gone, now)))

    async def count_slo(self) -> None:
        await self._slo.count(self._controller.status())

    async def roll_up(self) -> None:
        await history.roll_up(self._store, self._wall())

    async def prune(self) -> None:
        await history.prune(self._store, self._wall(), self._retention.days)


class SloMinutes:
    """Turns the status's running totals into counts per minute. A total that fell is a restart: counting begins anew."""

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store, self._wall = store, wall
        self._seen: tuple[float, float] | None = None

    async def count(self, status: StatusRow) -> None:
        if not status.leading or status.requests_total is None or status.requests_good is None:
            return
        now, before = (status.requests_total, status.requests_good), self._seen
        self._seen = now
        if before is None or now[0] < before[0] or now[1] < before[1]:
            return
        total, good = now[0] - before[0], now[1] - before[1]
        if total <= 0:
            return
        try:
            await history.add_slo_minute(self._store, "joint", int(self._wall()) // 60 * 60, good, total)
        except StoreUnavailable:
            self._seen = before  # counted with the next ones
            raise


def _guarded(job: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        try:
            await job()
        except StoreUnavailable as error:
            _log.warning("%s waits: %s", getattr(job, "__name__", job), error)
        except Exception:
            _log.exception("%s failed; it runs again at its next time", getattr(job, "__name__", job))

    return run
