"""Commands on their way: recorded before they leave, sent again under the same id until answered, forgotten when expired.

Never decides what to send, and never begins anything whose record could not be written.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from controller.clock import Clock
from controller.ports import StorePort
from controller.registry import Registry
from controller.views import listed
from fluidpd.command import Envelope, GrantTerms, Receipt
from fluidpd.names import Answer
from fluidpd.record import CommandRow

log = logging.getLogger(__name__)

RESEND_S = 1.0
RECORD_WITHIN_S = 2.0
RECORDED_KEPT = 4096


@dataclass(slots=True)
class _Pending:
    worker: str
    body: Any
    id: str
    until_s: float
    sent_s: float | None = None


class NotRecorded(Exception):
    """The database did not take the command, so it was not sent."""


class Outbox:
    """Unanswered commands by id. A command that must be answered is sent again after RESEND_S and at a reconnect."""

    def __init__(self, registry: Registry, store: StorePort, clock: Clock, may_send: Callable[[], bool] = lambda: True) -> None:
        self._registry = registry
        self._store = store
        self._clock = clock
        self._may_send = may_send
        self._pending: dict[str, _Pending] = {}
        self._recorded: dict[str, None] = {}  # ids whose answers are recorded too; renewals are not
        self._answers: list[tuple[str, Answer, str, float]] = []
        self._noting: asyncio.Task[None] | None = None
        self._worded: tuple[Any, str] | None = None  # the newest body, and its JSON
        self.epoch = 0
        self.sent: Counter[str] = Counter()

    def post(self, worker: str, body: Any, ttl_s: float) -> str | None:
        """Send now, without a record and without a second try (renewals, and what takes a permission back). Returns its id."""
        pending = _Pending(worker, body, uuid.uuid4().hex, self._clock.now() + ttl_s)
        return pending.id if self._transmit(pending, self._clock.now()) else None

    async def post_all(self, workers: Sequence[str], body: Any, ttl_s: float) -> dict[str, str]:
        """Record one command for each worker, together, then send them, without a second try. Returns the ids by worker.

        Raises NotRecorded, and then none was sent.
        """
        until_s = self._clock.now() + ttl_s
        pending = [_Pending(worker, body, uuid.uuid4().hex, until_s) for worker in workers]
        if not self._may_send():
            raise NotRecorded(f"the {body.kind} for {listed(list(workers))} was not sent: commands are not permitted now")
        if why := await self._record(pending):
            raise NotRecorded(f"the {body.kind} for {listed(list(workers))} was not recorded, so it was not sent: {why}")
        now_s = self._clock.now()
        for p in pending:
            self._transmit(p, now_s)
        return {p.worker: p.id for p in pending}

    async def post_recorded(self, worker: str, body: Any, ttl_s: float, *, must: bool = True) -> str:
        """Record, send, and go on sending until it is answered or expired.

        Raises NotRecorded; with `must` False (what finishes a move that is on record already) it is sent all the same.
        """
        pending = _Pending(worker, body, uuid.uuid4().hex, self._clock.now() + ttl_s)
        if not self._may_send():
            if must:
                raise NotRecorded(f"the {body.kind} for {worker} was not sent: commands are not permitted now")
            self._pending[pending.id] = pending
            return pending.id
        if why := await self._record([pending]):
            if must:
                raise NotRecorded(f"the {body.kind} for {worker} was not recorded, so it was not sent: {why}")
            log.warning("the %s for %s is sent without a record: %s", body.kind, worker, why)
        self._pending[pending.id] = pending
        self._transmit(pending, self._clock.now())
        return pending.id

    async def _record(self, pending: Sequence[_Pending]) -> str:
        """All in one transaction. Returns why they are not on record; empty if they are."""
        body = pending[0].body
        told = body.for_record() if isinstance(body, GrantTerms) else body.model_dump(mode="json")
        rows, wall_s = [], self._clock.wall()
        for p in pending:
            w = self._registry.get(p.worker)
            incarnation = w.incarnation if w is not None else 0
            rows.append(CommandRow(p.id, wall_s, p.worker, body.kind, self.epoch, incarnation, told))
        try:
            async with asyncio.timeout(RECORD_WITHIN_S):
                await self._store.record_commands(rows)
        except Exception as error:
            return str(error) or "the database is too slow"
        self._recorded |= dict.fromkeys(p.id for p in pending)
        while len(self._recorded) > RECORDED_KEPT:
            self._recorded.pop(next(iter(self._recorded)))
        return ""

    def settle(self, now_s: float) -> tuple[tuple[str, Any], ...]:
        """Send again what was not answered. Returns (worker, body) of what expired unanswered."""
        expired = []
        for pending in list(self._pending.values()):
            if now_s >= pending.until_s:
                del self._pending[pending.id]
                expired.append((pending.worker, pending.body))
            elif pending.sent_s is None or now_s - pending.sent_s >= RESEND_S:
                self._transmit(pending, now_s)
        return tuple(expired)

    def reconnected(self, worker: str) -> None:
        now_s = self._clock.now()
        for pending in self._pending.values():
            if pending.worker == worker:
                self._transmit(pending, now_s)

    def answered(self, receipt: Receipt) -> Any | None:
        """Note an answer; returns the body of a kept command that it answers."""
        pending = self._pending.pop(receipt.command_id, None)
        if receipt.command_id in self._recorded:
            del self._recorded[receipt.command_id]
            self._note(receipt.command_id, receipt.answer, receipt.detail)
        return pending.body if pending is not None else None

    def drop(self, worker: str, *, of_move: str) -> None:
        """A move ended: what was still to be said about it is not said any more."""
        for pending in list(self._pending.values()):
            if pending.worker == worker and getattr(pending.body, "move_id", None) == of_move:
                del self._pending[pending.id]

    def _transmit(self, pending: _Pending, now_s: float) -> bool:
        w = self._registry.get(pending.worker)
        if w is None or w.connection is None or not self._may_send():
            return False
        if self._worded is None or self._worded[0] is not pending.body:  # one body goes to many workers
            self._worded = pending.body, pending.body.model_dump_json()
        envelope = Envelope(
            id=pending.id,
            worker=pending.worker,
            incarnation=w.incarnation,
            epoch=self.epoch,
            ttl_s=max(0.001, pending.until_s - now_s),
        )
        if not w.connection.send(envelope.around(self._worded[1])):
            return False
        pending.sent_s = now_s
        self.sent[pending.body.kind] += 1
        return True

    def _note(self, command_id: str, answer: Answer, detail: str) -> None:
        self._answers.append((command_id, answer, detail, self._clock.wall()))
        if self._noting is None or self._noting.done():
            self._noting = asyncio.ensure_future(self._note_down())

    async def _note_down(self) -> None:
        """Those that come while others are written go together into the next transaction."""
        while self._answers:
            answers, self._answers = self._answers, []
            try:
                await self._store.record_answers(answers)
            except Exception as error:  # an answer that is not on disk changes nothing that was done
                log.warning("%d answers were not recorded: %s", len(answers), error)

    async def close(self) -> None:
        """Let the last answers be written."""
        if self._noting is not None:
            await asyncio.gather(self._noting, return_exceptions=True)
