"""Who may act: one holder at a time, by a row in SQL with an epoch and by a deadline of our own that needs no database.

Never acts on the database's word alone: a frozen database answers nothing, so the local deadline lapses first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Callable

from controller.clock import Clock
from controller.ports import StorePort

log = logging.getLogger(__name__)

TTL_S = 9.0
RENEW_S = 2.0
ASK_S = 2.0  # longest wait for the row: the next renewal asks again
LOCAL_DEADLINE_S = 6.0
MAX_SEEN_EPOCH = 2**31  # one rises with every start of a controller: a higher one is a fault of its sender


def holder_name() -> str:
    """Unique for every start of the process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Leadership:
    """Permitted from a successful take or renewal until LOCAL_DEADLINE_S after it was asked for."""

    def __init__(self, store: StorePort, clock: Clock, holder: str | None = None, address: str = "") -> None:
        self._store = store
        self._clock = clock
        self.holder = holder or holder_name()
        self.address = address
        self.epoch = 0
        self.trouble = "leadership was never taken"
        self._deadline_s: float | None = None
        self._asked_s: float | None = None
        self._is_deposed = False
        self.lost = asyncio.Event()  # another controller leads: this one does not come back by itself
        self._row = asyncio.Lock()  # a renewal must not ask with an epoch that is being raised
        self._raising: set[asyncio.Task[bool]] = set()
        self.on_epoch: Callable[[int], None] = lambda _epoch: None

    async def take(self) -> None:
        """Raises LeadershipHeld while another's time runs, and what the store raises."""
        asked_s = self._clock.now()
        self._asked_s = asked_s
        self._hold(await self._store.take_leadership(self.holder, TTL_S, self.address), asked_s)

    def _hold(self, epoch: int, asked_s: float) -> None:
        self.epoch = epoch
        self._deadline_s = asked_s + LOCAL_DEADLINE_S
        self.trouble = ""
        self.on_epoch(epoch)

    async def outbid(self, seen: int, who: str) -> None:
        """`who` obeys a higher epoch than ours. While the row is ours the database was lost or restored: lead on above it."""
        if self.epoch == 0 or self._is_deposed or seen <= self.epoch:
            return
        # The row may be written although whoever waits has gone: what it holds must be what we know.
        task = asyncio.ensure_future(self._outbid(seen, who))
        self._raising.add(task)
        task.add_done_callback(self._raising.discard)
        await asyncio.shield(task)

    async def _outbid(self, seen: int, who: str) -> bool:
        async with self._row:
            if self._is_deposed or seen <= self.epoch:
                return False
            before, asked_s = self.epoch, self._clock.now()
            try:
                raised = await self._store.raise_epoch(self.holder, before, seen, TTL_S)
            except Exception as error:  # the others still obey; the next answer of this one asks again
                log.warning("%s has seen epoch %d, above our %d, which could not be raised: %s", who, seen, before, error)
                return False
            if raised is None:
                self.deposed(f"{who} has seen epoch {seen}, this controller holds {before}")
                return False
            self._hold(raised, asked_s)
        log.warning(
            "%s has seen epoch %d, our database gave %d: was it lost or restored? leading on with %d", who, seen, before, raised
        )
        return True

    def overdue(self, now_s: float) -> bool:
        """Whether nobody asked for a renewal in time; a scheduled job normally does, every RENEW_S."""
        return self._asked_s is None or now_s - self._asked_s >= 1.5 * RENEW_S

    async def renew(self) -> bool:
        """Extend it. On a refusal another holder acts: this one stops at once and does not fight for it."""
        if self.epoch == 0 or self._is_deposed:
            return False
        self._asked_s = self._clock.now()
        async with self._row:
            return await self._renew()

    async def _renew(self) -> bool:
        if self._is_deposed:
            return False
        asked_s = self._clock.now()
        try:
            async with asyncio.timeout(ASK_S):
                renewed = await self._store.renew_leadership(self.holder, self.epoch, TTL_S)
        except Exception as error:  # whatever the database says, the local deadline goes on counting
            why = str(error) or f"the database did not answer within {ASK_S:g} s"
            self.trouble = (
                f"leadership could not be renewed ({why}); acting stops {LOCAL_DEADLINE_S:.0f} s after the last renewal"
            )
            log.warning(self.trouble)
            return False
        if renewed:
            if self._deadline_s is not None and self._clock.now() >= self._deadline_s:
                log.warning("leading again, with epoch %d: the database answers", self.epoch)
            self._deadline_s, self.trouble = asked_s + LOCAL_DEADLINE_S, ""
        else:
            self.deposed("another controller holds the leadership of this fleet")
        return renewed

    async def release(self) -> None:
        """Act no more, and let another take over at once instead of when the time has run out."""
        if self.epoch == 0 or self._is_deposed:
            return
        self.deposed("it gave the leadership back")
        try:
            async with asyncio.timeout(ASK_S):
                await self._store.release_leadership(self.holder, self.epoch)
        except Exception as error:  # then it runs out
            log.warning("the leadership could not be given back: %s", str(error) or "the database does not answer")

    def deposed(self, why: str) -> None:
        if self._deadline_s is not None:
            log.warning("no longer leading: %s", why)
        self._is_deposed = True
        self._deadline_s, self.trouble = None, f"not leading: {why}"
        self.lost.set()

    @property
    def until_s(self) -> float | None:
        """When it may act no more unless it renews, by its own monotonic clock; None while it does not lead."""
        return self._deadline_s

    def permitted(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s < self._deadline_s
