"""One controller among several: it stands by until the leadership is free, leads while it holds it, and stands by again.

Never lets two of its own times as leader mix: each has a controller, a hub and jobs of its own, which end with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from controller.alerting.engine import Alerting
from controller.app import create_app
from controller.clock import Clock
from controller.grafana import Grafana
from controller.jobs import Jobs
from controller.leadership import Leadership
from controller.loop import Controller
from controller.routers.sglang_router import SglangRouter
from controller.security.sessions import Sweep
from controller.security.tokens import book_of
from controller.settings import ControllerSettings
from controller.standby import LOOK_EVERY_S, Standby, standby_link
from controller.store.engine import StoreUnavailable
from controller.store.lease import LeadershipHeld
from controller.store.queries import Queries
from controller.store.sessions import Sessions
from controller.store.writes import Store
from controller.stream import Hub
from controller.tracing import Tracing
from fluidpd.cost import CostModel

log = logging.getLogger(__name__)

TRY_EVERY_S = 1.0
AFTER_TROUBLE_S = 5.0  # leading could not begin: another may have more luck meanwhile

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Succession:
    """An ASGI application: the standby's or the leader's, whichever it is now."""

    def __init__(
        self,
        settings: ControllerSettings,
        store: Store,
        queries: Queries,
        cost: CostModel,
        clock: Clock,
        address: str,
        tracing: Tracing | None = None,
    ) -> None:
        self._settings, self._store, self._queries = settings, store, queries
        self._cost, self._clock, self._address = cost, clock, address
        self._book = book_of(settings.security.tokens_file)
        self._tracing = tracing
        self._app: Any = None
        self._hub: Hub | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Leads or stands by from here on; the task ends only by a failure. Raises what keeps the first time from beginning."""
        self._task = asyncio.create_task(self._for_ever(), name="succession")
        begun = asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait({self._task, begun}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
            yield self._task
        finally:
            begun.cancel()
            await self.stop()

    async def stop(self) -> None:
        """Stop deciding and let another lead at once. Open moves stay on record: the next leader goes on with them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def close_streams(self) -> None:
        """Open streams would keep the server waiting."""
        if self._hub is not None:
            self._hub.close()

    # ------------------------------------------------------------ in turn

    async def _for_ever(self) -> None:
        while True:
            leadership = await self._win()
            try:
                await self._lead(leadership)
            except Exception as error:
                if not self._begun.is_set():
                    raise  # the start itself: whoever started it is told
                log.error("leading ended: %s", error, exc_info=not isinstance(error, StoreUnavailable))
                await self._stand_by_for(AFTER_TROUBLE_S)
            self._store.stand_by()

    async def _win(self) -> Leadership:
        """Take it; while another holds it, answer as a standby."""
        leadership = Leadership(self._store, self._clock, address=self._address)
        try:
            await leadership.take()
            return leadership
        except LeadershipHeld as held:
            log.info("standing by: %s (%s)", held, held.leader.address or "it does not say where")
        except StoreUnavailable:
            if not self._begun.is_set():
                raise
        async with self._answering_as_standby() as standby:
            while True:
                await standby.look()
                try:
                    await leadership.take()
                    return leadership
                except LeadershipHeld:
                    pass
                except StoreUnavailable as error:
                    log.warning("standing by, and the leadership cannot be looked at: %s", error)
                await self._clock.sleep(TRY_EVERY_S)

    async def _stand_by_for(self, seconds: float) -> None:
        async with self._answering_as_standby() as standby:
            until_s = self._clock.now() + seconds
            while self._clock.now() < until_s:
                await standby.look()
                await self._clock.sleep(LOOK_EVERY_S)

    @asynccontextmanager
    async def _answering_as_standby(self) -> AsyncIterator[Standby]:
        hub = Hub()
        standby = Standby(self._settings, self._store, self._queries, hub, self._clock)
        await standby.look()
        link = standby_link(standby)
        app = create_app(self._settings, standby, self._store, self._queries, hub, link=link, book=self._book)
        self._answer_with(app, hub)
        yield standby

    async def _lead(self, leadership: Leadership) -> None:
        """From the take until another controller has it."""
        s = self._settings
        async with AsyncExitStack() as opened:
            opened.push_async_callback(leadership.release)
            opened.push_async_callback(self._write_last)
            router = None
            if s.router.url is not None:
                router = SglangRouter(s.router.url, clock=self._clock, health_wait_s=s.router.health_wait_s)
                opened.push_async_callback(router.close)
            hub = Hub()
            if self._tracing is not None:
                hub.tap(self._tracing.observe)
            controller = Controller(s, self._store, router, self._cost, self._clock, hub, leadership, self._book)
            opened.push_async_callback(controller.stop)
            alerting = Alerting(
                s, controller, controller.slo_counts, self._store, self._queries, self._clock, may_act=controller.leads
            )
            await alerting.begin()  # before a worker is heard: counting goes on from where the last leader was
            opened.push_async_callback(alerting.stop)
            await controller.start()
            alerting.start()
            sweep = Sweep(Sessions(self._store), self._book, self._clock.wall) if self._book is not None else None
            grafana = Grafana(s.grafana, self._queries, controller.leads, self._clock.wall) if s.grafana.url is not None else None
            if grafana is not None:
                opened.push_async_callback(grafana.close)
            jobs = Jobs(
                controller,
                self._store,
                hub,
                s.retention,
                wall=self._clock.wall,
                now=self._clock.now,
                sweep=sweep,
                grafana=grafana,
            )
            jobs.start()
            opened.push_async_callback(jobs.stop)
            self._answer_with(create_app(s, controller, self._store, self._queries, hub, alerting=alerting, book=self._book), hub)
            log.info("leading with epoch %d", leadership.epoch)
            if not self._store.is_shared:
                await asyncio.Event().wait()  # the file has one owner: who lost it to a hand at the row does not fight for it
            await leadership.lost.wait()

    async def _write_last(self) -> None:
        """What is buffered, while this one may still write."""
        with suppress(StoreUnavailable):
            await self._store.flush()

    def _answer_with(self, app: Any, hub: Hub) -> None:
        before, self._hub = self._hub, hub
        self._app = app
        if before is not None:
            before.close()  # its listeners come again, to the new one
        self._begun.set()
