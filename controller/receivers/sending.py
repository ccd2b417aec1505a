"""Sends what the outbox holds: to each receiver in order and by itself, again until it is taken, and quietly while it is down.

Never loses a notice that can still be delivered, and never lets one receiver that hangs hold up another.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from controller.clock import Clock
from controller.receivers.calling import LONGEST_WAIT_S, NotTaken
from controller.receivers.news import News
from controller.receivers.receiver import Receiver
from controller.store.alert_queries import DROPPED, PENDING, SENT, Notice
from controller.store.alerting import AlertStore
from controller.store.engine import StoreUnavailable

log = logging.getLogger(__name__)

TURN_S = 0.5
REFRESH_S = 60.0
FIRST_WAIT_S = 1.0
BREAK_AFTER, BREAK_S = 5, 60.0  # so many failures in a row, then so long a silence before one call is tried
GIVE_UP_AFTER_S = 86_400.0
OUTCOMES = ("sent", "retried", "dropped", "refused", "breaker_open")


@dataclass(slots=True)
class Breaker:
    """Open after BREAK_AFTER failures in a row; then one call is let through each BREAK_S until one succeeds."""

    failures: int = 0
    until_s: float | None = None
    since_s: float | None = None  # wall time of the first failure of this row
    last_error: str = ""

    def lets_through(self, now_s: float) -> bool:
        return self.until_s is None or now_s >= self.until_s

    def failed(self, now_s: float, wall_s: float, error: str) -> None:
        self.failures += 1
        self.last_error = error
        self.since_s = wall_s if self.since_s is None else self.since_s
        if self.failures >= BREAK_AFTER:
            self.until_s = now_s + BREAK_S

    def succeeded(self) -> None:
        self.failures, self.until_s, self.since_s, self.last_error = 0, None, None, ""


@dataclass(slots=True)
class _Line:
    receiver: Receiver
    breaker: Breaker = field(default_factory=Breaker)
    refreshed_s: float | None = None


def backoff_s(attempts: int, chance: Callable[[], float]) -> float:
    """1 s, 2 s, 4 s .. 5 min after so many failures, each 20 % shorter or longer: receivers are not asked in step."""
    wait_s = min(FIRST_WAIT_S * 2.0 ** min(max(0, attempts - 1), 20), LONGEST_WAIT_S)
    return min(LONGEST_WAIT_S, wait_s * (0.8 + 0.4 * chance()))


class Sending:
    """`current`: what fires now, and what ended a short while ago; `may_send`: whether this controller leads."""

    def __init__(
        self,
        receivers: Sequence[Receiver],
        store: AlertStore,
        clock: Clock,
        *,
        current: Callable[[], Sequence[News]],
        may_send: Callable[[], bool],
        queue: int = 1000,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._lines = {r.name: _Line(r) for r in receivers}
        self._store, self._clock = store, clock
        self._current, self._may_send = current, may_send
        self._queue, self._chance = queue, chance
        self._unwritten: list[Notice] = []  # while the database is away: sent from here, and written down when it is back
        self._unsettled: dict[int, dict[str, Any]] = {}  # attempts that the database has not heard of: not made again
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[tuple[str, str]] = Counter()

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        return tuple(line.receiver for line in self._lines.values())

    def start(self) -> None:
        for name in self._lines:
            self._tasks.append(asyncio.create_task(self._serve(name), name=f"receiver-{name}"))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for line in self._lines.values():
            await line.receiver.close()

    def failing(self) -> dict[str, tuple[float, str]]:
        """Receivers that took nothing the last three times or more: since when, and why."""
        lines = self._lines.items()
        return {n: (b.since_s, b.last_error) for n, line in lines if (b := line.breaker).failures >= 3 and b.since_s is not None}

    def hold(self, notices: Sequence[Notice]) -> None:
        """Notices that the database did not take."""
        known = {n.key for n in self._unwritten}
        self._unwritten.extend(n for n in notices if n.key not in known)

    def take_unwritten(self) -> list[Notice]:
        """To be written now, as they stand; `hold` gives them back."""
        found, self._unwritten = self._unwritten, []
        return found

    async def _serve(self, name: str) -> None:
        while True:
            try:
                await self.turn(name)
            except StoreUnavailable as error:
                log.warning("notices for %s wait: %s", name, error)
            except Exception:
                log.exception("telling %s failed; it goes on", name)
            await self._clock.sleep(TURN_S)

    async def turn(self, name: str) -> None:
        """What one receiver is to be told now: the outbox, then the repetition of what fires."""
        line = self._lines[name]
        if not self._may_send():
            return
        now_s = self._clock.now()
        if not line.breaker.lets_through(now_s):
            return
        if line.breaker.until_s is not None:
            self.counts[name, "breaker_open"] += 1
        try:
            due: Sequence[Notice] = await self._store.due(name, self._clock.wall())
        except StoreUnavailable:
            due = ()
        wall_s = self._clock.wall()
        held = [n for n in self._unwritten if n.receiver == name and n.outcome == PENDING and n.next_s <= wall_s]
        waits: set[str] = set()  # what was not taken: nothing newer of the same alert overtakes it
        for notice in (*due, *held):
            if notice.id in self._unsettled:
                await self._settle_again(notice.id)
                continue
            if not self._may_send() or not line.breaker.lets_through(self._clock.now()):
                return
            if notice.fingerprint not in waits and not await self._deliver(line, notice):
                waits.add(notice.fingerprint)
        await self._refresh(line)
        try:
            dropped = await self._store.shorten(name, self._queue)
        except StoreUnavailable:
            return
        if dropped:
            self.counts[name, "dropped"] += dropped
            log.error("%d notices for %s were dropped: it takes none, and its queue is full", dropped, name)

    async def _deliver(self, line: _Line, notice: Notice) -> bool:
        name, wall_s = line.receiver.name, self._clock.wall()
        attempts = notice.attempts + 1
        try:
            await line.receiver.tell([News.of_body(notice.fingerprint, notice.key, notice.body)])
        except NotTaken as error:
            line.breaker.failed(self._clock.now(), wall_s, str(error))
            ends = error.final or wall_s - notice.created_s > GIVE_UP_AFTER_S
            wait_s = backoff_s(attempts, self._chance) if error.wait_s is None else error.wait_s
            outcome = "refused" if error.final else "dropped" if ends else "retried"
            self.counts[name, outcome] += 1
            log.warning("%s did not take %s (%s): %s", name, notice.key, outcome, error)
            stored = DROPPED if ends else notice.outcome
            await self._settle(notice, outcome=stored, attempts=attempts, error=str(error), next_s=wall_s + wait_s)
            return ends
        line.breaker.succeeded()
        self.counts[name, "sent"] += 1
        await self._settle(notice, outcome=SENT, attempts=attempts, error="", next_s=0.0)
        return True

    async def _settle(self, notice: Notice, *, outcome: str, attempts: int, error: str, next_s: float) -> None:
        wall_s = self._clock.wall()
        if notice.id:
            how = {"outcome": outcome, "now_s": wall_s, "attempts": attempts, "error": error, "next_s": next_s}
            self._unsettled[notice.id] = how
            await self._settle_again(notice.id)
            return
        sent_s = wall_s if outcome == SENT else None
        done = replace(notice, outcome=outcome, attempts=attempts, last_error=error, next_s=next_s, sent_s=sent_s)
        self._unwritten = [done if n.key == notice.key else n for n in self._unwritten]

    async def _settle_again(self, id: int) -> None:
        await self._store.settle(id, **self._unsettled[id])
        del self._unsettled[id]

    async def _refresh(self, line: _Line) -> None:
        now_s = self._clock.now()
        if not line.receiver.refreshes or (line.refreshed_s is not None and now_s - line.refreshed_s < REFRESH_S):
            return
        news = self._current()
        line.refreshed_s = now_s
        if not news:
            return
        try:
            await line.receiver.tell(news)
        except NotTaken as error:
            line.breaker.failed(self._clock.now(), self._clock.wall(), str(error))
            self.counts[line.receiver.name, "retried"] += 1
            line.refreshed_s = now_s - REFRESH_S + backoff_s(line.breaker.failures, self._chance)
            log.warning("%s did not take the repetition of what fires: %s", line.receiver.name, error)
        else:
            line.breaker.succeeded()
            self.counts[line.receiver.name, "sent"] += 1

    async def test(self, name: str, news: News) -> str:
        """Send one message now, past the outbox. Returns why it was not taken, or nothing. Raises KeyError."""
        line = self._lines[name]
        try:
            await line.receiver.tell([news])
        except NotTaken as error:
            return str(error)
        return ""
