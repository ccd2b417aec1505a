"""Changes of the router's membership, one at a time for each worker: the newest wish cancels the one before.

Never decides who serves what: moves and the membership check say it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from controller.clock import Clock
from controller.ports import Member, Router, RouterTrouble
from controller.registry import Worker
from fluidpd.names import Role

log = logging.getLogger(__name__)

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
CALL_LIMIT_S = 20.0
HOLD_S = 0.2


class Routing:
    """`router` None: nothing routes through us, so every wish is fulfilled at once."""

    def __init__(self, router: Router | None, clock: Clock, may_write: Callable[[], bool] = lambda: True) -> None:
        self._router = router
        self._clock = clock
        self._may_write = may_write
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self.members: Mapping[str, Member] | None = None  # as last seen; None: not known
        self.trouble = ""

    @property
    def present(self) -> bool:
        return self._router is not None

    def busy(self, worker: str) -> bool:
        return worker in self._tasks

    async def look(self) -> Mapping[str, Member] | None:
        """Read the router's list. None, with `trouble` set, if it does not answer."""
        if self._router is None:
            return None
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                self.members = await self._router.members()
            self.trouble = ""
        except (RouterTrouble, TimeoutError) as error:
            self.members, self.trouble = None, str(error) or "the router does not answer"
        return self.members

    def want(
        self,
        w: Worker,
        role: Role | None,
        *,
        done: Callable[[float], Awaitable[None]] | None = None,
        failed: Callable[[str], Awaitable[None]] | None = None,
        give_up_s: float | None = None,
    ) -> None:
        """Bring `w` to `role` (None: out). `done(took_s)` when it is so; `failed(why)` if given up after `give_up_s`."""
        before = self._tasks.pop(w.name, None)
        if before is not None:
            before.cancel()
        task = asyncio.ensure_future(self._bring(w.name, w.url, role, w.bootstrap_port, before, done, failed, give_up_s))
        self._tasks[w.name] = task
        self._running.add(task)
        task.add_done_callback(self._finished)

    async def _bring(
        self,
        name: str,
        url: str,
        role: Role | None,
        bootstrap_port: int | None,
        before: asyncio.Task[None] | None,
        done: Callable[[float], Awaitable[None]] | None,
        failed: Callable[[str], Awaitable[None]] | None,
        give_up_s: float | None,
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        started_s = self._clock.now()
        attempt = 0
        while True:
            if not self._may_write():  # leadership lapsed: the router has no fence, so we keep off it ourselves
                await self._clock.sleep(HOLD_S)
                continue
            why = await self._try(url, role, bootstrap_port)
            if why is None:
                break
            if why != self.trouble:
                log.warning("%s", why)
            self.trouble = why
            if give_up_s is not None and self._clock.now() - started_s >= give_up_s:
                self._release(name)
                if failed is not None:
                    await failed(why)
                return
            await self._clock.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
        self.trouble = ""
        self._release(name)  # from here on nothing may cancel: what follows records what was done
        if done is not None:
            await done(self._clock.now() - started_s)

    async def _try(self, url: str, role: Role | None, bootstrap_port: int | None) -> str | None:
        if self._router is None:
            return None
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                await self._router.ensure(url, role, bootstrap_port)
        except RouterTrouble as error:
            return str(error)
        except TimeoutError:
            return f"the router did not finish with {url} within {CALL_LIMIT_S:.0f} s"
        return None

    def _release(self, name: str) -> None:
        if self._tasks.get(name) is asyncio.current_task():
            del self._tasks[name]

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        for name in [n for n, t in self._tasks.items() if t is task]:
            del self._tasks[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("a change of the router failed", exc_info=task.exception())

    async def drop(self, url: str) -> bool:
        """Take an address out that nobody has any more. False: it may still be there."""
        if not self._may_write():
            return False
        if (why := await self._try(url, None, None)) is not None:
            self.trouble = why
        return why is None

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
