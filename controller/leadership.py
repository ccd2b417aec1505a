"""Who may act: one holder at a time, by a row in SQL with an epoch and by a deadline of our own that needs no database.

Never acts on the database's word alone: a frozen database answers nothing, so the local deadline lapses first.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid

from controller.clock import Clock
from controller.ports import StorePort

log = logging.getLogger(__name__)

TTL_S = 9.0
RENEW_S = 2.0
LOCAL_DEADLINE_S = 6.0


def holder_name() -> str:
    """Unique for every start of the process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Leadership:
    """Permitted from a successful take or renewal until LOCAL_DEADLINE_S after it was asked for."""

    def __init__(self, store: StorePort, clock: Clock, holder: str | None = None) -> None:
        self._store = store
        self._clock = clock
        self.holder = holder or holder_name()
        self.epoch = 0
        self.trouble = "leadership was never taken"
        self._deadline_s: float | None = None
        self._asked_s: float | None = None
        self._is_deposed = False

    async def take(self) -> None:
        asked_s = self._clock.now()
        self._asked_s = asked_s
        self.epoch = await self._store.take_leadership(self.holder, TTL_S)
        self._deadline_s = asked_s + LOCAL_DEADLINE_S
        self.trouble = ""

    def overdue(self, now_s: float) -> bool:
        """Whether nobody asked for a renewal in time; a scheduled job normally does, every RENEW_S."""
        return self._asked_s is None or now_s - self._asked_s >= 1.5 * RENEW_S

    async def renew(self) -> bool:
        """Extend it. On a refusal another holder acts: this one stops at once and does not fight for it."""
        if self.epoch == 0 or self._is_deposed:
            return False
        asked_s = self._clock.now()
        self._asked_s = asked_s
        try:
            renewed = await self._store.renew_leadership(self.holder, self.epoch, TTL_S)
        except Exception as error:  # whatever the database says, the local deadline goes on counting
            self.trouble = (
                f"leadership could not be renewed ({error}); acting stops {LOCAL_DEADLINE_S:.0f} s after the last renewal"
            )
            log.warning(self.trouble)
            return False
        if renewed:
            self._deadline_s, self.trouble = asked_s + LOCAL_DEADLINE_S, ""
        else:
            self.deposed("another controller holds the leadership of this fleet")
        return renewed

    def deposed(self, why: str) -> None:
        if self._deadline_s is not None:
            log.warning("no longer leading: %s", why)
        self._is_deposed = True
        self._deadline_s, self.trouble = None, f"not leading: {why}; stop one of the two, or restart this one to take over"

    def permitted(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s < self._deadline_s
